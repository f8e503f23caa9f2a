#include "base/crc32c.h"

#include <cstring>

#include "base/crc32c_table.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace shoal {

#if defined(__x86_64__)
namespace {

// One dependent chain: 8 bytes per 3 cycles, about what one core can copy. Three interleaved chains
// would be faster in cache, but the data here comes from memory or a socket.
__attribute__((target("sse4.2"))) uint32_t crc32c_by_instruction(std::span<const std::byte> data,
                                                                 uint32_t crc) {
  uint64_t state = ~crc;
  while (data.size() >= 8) {
    uint64_t word;
    std::memcpy(&word, data.data(), sizeof word);
    state = _mm_crc32_u64(state, word);
    data = data.subspan(8);
  }
  auto last = static_cast<uint32_t>(state);
  for (const std::byte byte : data) {
    last = _mm_crc32_u8(last, std::to_integer<uint8_t>(byte));
  }
  return ~last;
}

}  // namespace

uint32_t crc32c(std::span<const std::byte> data, uint32_t crc) {
  return __builtin_cpu_supports("sse4.2") ? crc32c_by_instruction(data, crc) : crc32c_by_table(data, crc);
}

#else

uint32_t crc32c(std::span<const std::byte> data, uint32_t crc) { return crc32c_by_table(data, crc); }

#endif

}  // namespace shoal
