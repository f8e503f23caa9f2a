#include "base/crc32c.h"

#include <random>
#include <string_view>
#include <vector>

#include "check.h"

using namespace shoal;

namespace {

std::vector<std::byte> random_bytes(size_t n, std::mt19937& random) {
  std::vector<std::byte> bytes(n);
  for (std::byte& byte : bytes) {
    byte = static_cast<std::byte>(random());
  }
  return bytes;
}

// The definition, one bit at a time.
uint32_t crc32c_by_bits(std::span<const std::byte> data) {
  uint32_t crc = ~0U;
  for (const std::byte byte : data) {
    crc ^= std::to_integer<uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78U : 0U);
    }
  }
  return ~crc;
}

}  // namespace

TEST(crc32c_matches_known_values) {
  const std::string_view digits = "123456789";
  CHECK_EQ(crc32c(std::as_bytes(std::span(digits))), 0xe3069283);
  CHECK_EQ(crc32c({}), 0);
  // RFC 3720, B.4.
  CHECK_EQ(crc32c(std::vector<std::byte>(32)), 0x8a9136aa);
  CHECK_EQ(crc32c(std::vector<std::byte>(32, std::byte{0xff})), 0x62a8ab43);
}

TEST(crc32c_instruction_and_table_agree_with_the_definition) {
  std::mt19937 random(1);
  for (size_t n = 0; n < 300; ++n) {
    const auto bytes = random_bytes(n + 8, random);
    const auto data = std::span(bytes).subspan(n % 8, n);  // every alignment
    CHECK_EQ(crc32c(data), crc32c_by_bits(data));
    CHECK_EQ(crc32c_by_table(data), crc32c_by_bits(data));
  }
}

TEST(crc32c_of_parts_continues) {
  std::mt19937 random(2);
  const auto bytes = random_bytes(1000, random);
  const std::span<const std::byte> data(bytes);
  for (size_t cut = 0; cut <= data.size(); cut += 37) {
    CHECK_EQ(crc32c(data.subspan(cut), crc32c(data.first(cut))), crc32c(data));
    CHECK_EQ(crc32c_by_table(data.subspan(cut), crc32c_by_table(data.first(cut))), crc32c(data));
  }
}
