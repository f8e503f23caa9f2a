// Copying rows. A result larger than the caches is streamed past them: its lines need not be read before
// they are written, and what is in the caches stays there.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace shoal {

// Results above this are streamed.
inline constexpr size_t kStreamBytesMin = size_t{8} << 20;

// Asks the cache for the head of a row; the hardware follows a longer one by itself.
inline void prefetch_row(const void* row, size_t bytes) {
  for (size_t at = 0; at < std::min<size_t>(bytes, 512); at += 64)
    __builtin_prefetch(static_cast<const std::byte*>(row) + at);
}

// `floats` floats from `from`, which need not be aligned.
inline void copy_floats(float* to, const void* from, size_t floats, bool stream) {
  auto* out = reinterpret_cast<std::byte*>(to);
  const auto* in = static_cast<const std::byte*>(from);
  const size_t bytes = 4 * floats;
  size_t done = 0;
#if defined(__SSE2__)
  if (stream && reinterpret_cast<uintptr_t>(out) % 16 == 0) {
    for (; done + 16 <= bytes; done += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(out + done),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + done)));
    }
  }
#endif
  for (; done + 64 <= bytes; done += 64) std::memcpy(out + done, in + done, 64);
  for (; done < bytes; done += 4) std::memcpy(out + done, in + done, 4);
}

// Before anybody is told that streamed rows are there.
inline void finish_streaming() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace shoal
