// How row values travel: as they are, or in fewer bits. Encoding rounds to nearest even; decoding is
// exact. int8 carries one float scale per row (max |x| / 127), then dim signed bytes, padded to 4.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shoal {

enum class Codec : uint8_t { fp32 = 0, fp16 = 1, bf16 = 2, int8 = 3 };

inline bool is_codec(uint8_t value) { return value <= 3; }

// Bytes of one encoded row.
inline size_t encoded_bytes(Codec codec, uint32_t dim) {
  switch (codec) {
    case Codec::fp32: return size_t{4} * dim;
    case Codec::fp16:
    case Codec::bf16: return size_t{2} * dim;
    case Codec::int8: return 4 + (size_t{dim} + 3) / 4 * 4;
  }
  return 0;
}

// Largest finite |x| whose encoding is still finite (int8: any finite fp32).
float encodable_max(Codec codec);

// `rows` rows of `dim` floats, tightly packed on both sides (encoded_bytes per row).
void encode_rows(Codec codec, const float* values, size_t rows, uint32_t dim, std::byte* out);
void decode_rows(Codec codec, const std::byte* in, size_t rows, uint32_t dim, float* values);

// Largest bit pattern of |x| over the floats: >= 0x7f800000 means that one of them is inf or NaN. One
// pass at memory speed; the client runs it before the first byte of a push leaves.
uint32_t max_abs_bits(const float* values, size_t count);

}  // namespace shoal
