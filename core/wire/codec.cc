// All conversions are integer work or exact float steps on whole vectors: no branches inside loops, no
// conversion instructions, so every clone gives the same bits (NaN included).
#include "wire/codec.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "base/cpu_clones.h"

namespace shoal {
namespace {

// The wire promises bytes, not alignment.
struct __attribute__((packed, may_alias)) WireHalf {
  uint16_t bits;
};

constexpr uint32_t float_inf = 0x7f800000u;
constexpr uint32_t magnitude_mask = 0x7fffffffu;

SHOAL_INLINE uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }
SHOAL_INLINE float from_bits(uint32_t bits) { return std::bit_cast<float>(bits); }

SHOAL_INLINE uint16_t to_fp16(float x) {
  const uint32_t magnitude = bits_of(x) & magnitude_mask;
  const uint32_t sign = (bits_of(x) >> 16) & 0x8000u;
  // Normal halves: round to even on the 13 bits that go, and move the bias from 127 to 15. A carry out
  // of the mantissa is the next exponent, up to inf.
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  const uint32_t normal = (rounded - (112u << 23)) >> 13;
  // Subnormal halves: the unit of 0.5f is 2^-24, theirs, so the addition rounds in the right place.
  const uint32_t subnormal = bits_of(from_bits(magnitude) + 0.5f) - bits_of(0.5f);
  const uint32_t special = magnitude > float_inf ? 0x7e00u | ((magnitude >> 13) & 0x3ffu) : 0x7c00u;
  uint32_t half = magnitude < bits_of(0x1p-14f) ? subnormal : normal;
  half = magnitude >= bits_of(65536.0f) ? special : half;
  return static_cast<uint16_t>(half | sign);
}

SHOAL_INLINE float from_fp16(uint16_t half) {
  const uint32_t shifted = (half & 0x7fffu) << 13;
  const uint32_t exponent = shifted & (0x1fu << 23);
  const uint32_t normal = shifted + (112u << 23);
  const uint32_t special = normal + (112u << 23);
  const uint32_t subnormal = bits_of(from_bits(normal + (1u << 23)) - 0x1p-14f);
  uint32_t magnitude = exponent == 0 ? subnormal : normal;
  magnitude = exponent == (0x1fu << 23) ? special : magnitude;
  return from_bits(magnitude | (half & 0x8000u) << 16);
}

SHOAL_INLINE uint16_t to_bf16(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  // Rounding could carry a NaN into another number.
  return static_cast<uint16_t>((bits & magnitude_mask) > float_inf ? (bits >> 16) | 0x40u : rounded);
}

SHOAL_INLINE float from_bf16(uint16_t half) { return from_bits(uint32_t{half} << 16); }

template <uint16_t (*convert)(float)>
struct EncodeHalf {
  SHOAL_INLINE static void run(const float* __restrict in, size_t count, std::byte* __restrict out) {
    auto* to = reinterpret_cast<WireHalf*>(out);
    for (size_t i = 0; i < count; ++i) to[i].bits = convert(in[i]);
  }
};

template <float (*convert)(uint16_t)>
struct DecodeHalf {
  SHOAL_INLINE static void run(const std::byte* __restrict in, size_t count, float* __restrict out) {
    const auto* from = reinterpret_cast<const WireHalf*>(in);
    for (size_t i = 0; i < count; ++i) out[i] = convert(from[i].bits);
  }
};

// Signed, because SSE2 only compares signed; without the sign bit the order is the same.
struct MaxAbsBits {
  SHOAL_INLINE static uint32_t run(const float* in, size_t count) {
    int32_t most = 0;
    for (size_t i = 0; i < count; ++i)
      most = std::max(most, static_cast<int32_t>(bits_of(in[i]) & magnitude_mask));
    return static_cast<uint32_t>(most);
  }
};

// The scale of a row whose largest magnitude is `most`. Below the normal numbers it could not hold the
// row's precision: such a row (|x| < 1.5e-36) goes as zeros. A row with inf or NaN comes back all NaN.
SHOAL_INLINE float int8_scale(uint32_t most) {
  if (most >= float_inf) return std::numeric_limits<float>::quiet_NaN();
  float scale = from_bits(most) / 127.0f;
  // Next to the largest float the quotient may round up, and 127 of it be inf: take the float below.
  if (scale * 127.0f > std::numeric_limits<float>::max()) scale = from_bits(bits_of(scale) - 1);
  return scale < std::numeric_limits<float>::min() ? 0.0f : scale;
}

struct EncodeInt8 {
  SHOAL_INLINE static void run(const float* __restrict in, size_t rows, uint32_t dim,
                               std::byte* __restrict out) {
    const size_t row_bytes = encoded_bytes(Codec::int8, dim);
    for (size_t row = 0; row < rows; ++row, in += dim, out += row_bytes) {
      const float scale = int8_scale(MaxAbsBits::run(in, dim));
      std::memcpy(out, &scale, sizeof scale);
      auto* to = reinterpret_cast<int8_t*>(out + sizeof scale);
      std::memset(to, 0, row_bytes - sizeof scale);
      if (scale > 0.0f) quantise(in, dim, scale, to);
    }
  }

  SHOAL_INLINE static void quantise(const float* __restrict in, uint32_t dim, float scale,
                                    int8_t* __restrict to) {
    // 1.5 * 2^23 has a unit of 1: adding it rounds to the nearest whole number, halves to even, and
    // leaves that number in the low bits.
    constexpr float shift = 0x1.8p23f;
    for (uint32_t i = 0; i < dim; ++i) {
      const auto rounded = static_cast<int32_t>(bits_of(in[i] / scale + shift) - bits_of(shift));
      to[i] = static_cast<int8_t>(std::clamp(rounded, -127, 127));
    }
  }
};

struct DecodeInt8 {
  SHOAL_INLINE static void run(const std::byte* __restrict in, size_t rows, uint32_t dim,
                               float* __restrict out) {
    const size_t row_bytes = encoded_bytes(Codec::int8, dim);
    for (size_t row = 0; row < rows; ++row, in += row_bytes, out += dim) {
      float scale;
      std::memcpy(&scale, in, sizeof scale);
      const auto* from = reinterpret_cast<const int8_t*>(in + sizeof scale);
      for (uint32_t i = 0; i < dim; ++i) out[i] = scale * static_cast<float>(from[i]);
    }
  }
};

}  // namespace

float encodable_max(Codec codec) {
  switch (codec) {
    case Codec::fp16: return 65519.996f;       // the float below 65520, which rounds to inf
    case Codec::bf16: return 0x1.fefffep127f;  // the float below the middle of the last bf16 and inf
    case Codec::fp32:
    case Codec::int8: break;
  }
  return std::numeric_limits<float>::max();
}

void encode_rows(Codec codec, const float* values, size_t rows, uint32_t dim, std::byte* out) {
  const size_t count = rows * dim;
  switch (codec) {
    case Codec::fp32:
      if (count > 0) std::memcpy(out, values, 4 * count);
      return;
    case Codec::fp16: return run_clone<EncodeHalf<to_fp16>>(values, count, out);
    case Codec::bf16: return run_clone<EncodeHalf<to_bf16>>(values, count, out);
    case Codec::int8: return run_clone<EncodeInt8>(values, rows, dim, out);
  }
}

void decode_rows(Codec codec, const std::byte* in, size_t rows, uint32_t dim, float* values) {
  const size_t count = rows * dim;
  switch (codec) {
    case Codec::fp32:
      if (count > 0) std::memcpy(values, in, 4 * count);
      return;
    case Codec::fp16: return run_clone<DecodeHalf<from_fp16>>(in, count, values);
    case Codec::bf16: return run_clone<DecodeHalf<from_bf16>>(in, count, values);
    case Codec::int8: return run_clone<DecodeInt8>(in, rows, dim, values);
  }
}

uint32_t max_abs_bits(const float* values, size_t count) { return run_clone<MaxAbsBits>(values, count); }

}  // namespace shoal
