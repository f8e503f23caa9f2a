// Counter-based initial values. Elements 2p and 2p+1 of a row are made from the low and the high half
// of one 64-bit hash of (salt, key, p), so any element can be made alone and in any order.
#include "update/init.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>

#include "base/cpu_clones.h"
#include "base/hash.h"
#include "base/number_text.h"

namespace shoal {
namespace {

// The halves of a hash are taken as they lie in memory.
static_assert(std::endian::native == std::endian::little);

constexpr uint32_t block_elements = 64;

// One row's stream: the outputs of a splitmix64 generator that starts at `base`.
SHOAL_INLINE void fill_bits(uint64_t base, uint32_t first, uint32_t* bits) {
  uint64_t pairs[block_elements / 2];
  for (uint32_t p = 0; p < block_elements / 2; ++p)
    pairs[p] = mix64(base + (uint64_t{first} / 2 + p) * 0x9e3779b97f4a7c15ULL);
  std::memcpy(bits, pairs, sizeof pairs);
}

// Runs `convert(bits, out)` over the row in whole blocks; the last block is made whole and cut.
template <typename Convert>
SHOAL_INLINE void fill_row(uint64_t base, float* value, uint32_t dim, Convert convert) {
  for (uint32_t first = 0; first < dim; first += block_elements) {
    uint32_t bits[block_elements];
    float out[block_elements];
    fill_bits(base, first, bits);
    for (uint32_t i = 0; i < block_elements; ++i) out[i] = convert(bits[i]);
    std::memcpy(value + first, out, size_t{4} * std::min(block_elements, dim - first));
  }
}

struct UniformKernel {
  SHOAL_INLINE static void run(uint64_t base, float low, float width, float top, float* value, uint32_t dim) {
    fill_row(base, value, dim, [=](uint32_t bits) SHOAL_INLINE_LAMBDA {
      // 24 bits: every one of them is a float, none rounds up to 1. The sum may still round up to
      // `high`, which is excluded: `top` is the float below it.
      const float share = static_cast<float>(static_cast<int32_t>(bits >> 8)) * 0x1p-24f;
      const float x = low + share * width;
      return x < top ? x : top;
    });
  }
};

// A whole number below 2^52 as a double, without the conversion that AVX2 lacks: it becomes the
// mantissa of 2^52 + n.
SHOAL_INLINE double whole(uint64_t n) { return std::bit_cast<double>(0x4330000000000000ULL | n) - 0x1p52; }

// Natural logarithm for normal x in (0, 1), to about 1e-12: x = 2^e m with m in [sqrt(1/2), sqrt(2)),
// then log m = 2 atanh((m - 1) / (m + 1)) by its series.
SHOAL_INLINE double log_below_one(double x) {
  constexpr uint64_t root_half = 0x3fe6a09e667f3bcdULL;  // sqrt(1/2): what lies above it keeps e
  const uint64_t shifted = std::bit_cast<uint64_t>(x) + (0x3ff0000000000000ULL - root_half);
  const double exponent = whole(shifted >> 52) - 1023.0;
  const double m = std::bit_cast<double>((shifted & 0x000fffffffffffffULL) + root_half);
  const double f = (m - 1.0) / (m + 1.0);
  const double s = f * f;
  double series = 1.0 / 15.0;
  series = series * s + 1.0 / 13.0;
  series = series * s + 1.0 / 11.0;
  series = series * s + 1.0 / 9.0;
  series = series * s + 1.0 / 7.0;
  series = series * s + 1.0 / 5.0;
  series = series * s + 1.0 / 3.0;
  series = series * s + 1.0;
  return exponent * 0.69314718055994530942 + 2.0 * f * series;
}

// The normal quantile of (bits + 1/2) / 2^32: Wichura's AS 241, PPND7, accurate to 1e-7. Its third
// region begins below e^-25 and 2^-33 is above that, so two regions are enough. No branches: both are
// computed and one is taken, so the loop vectorises.
SHOAL_INLINE double normal_quantile(uint32_t bits) {
  const double q = (whole(bits) + 0.5) * 0x1p-32 - 0.5;
  const double distance = q < 0.0 ? -q : q;
  const double r = 0.180625 - q * q;
  const double near_top = q * (((59.109374720 * r + 159.29113202) * r + 50.434271938) * r + 3.3871327179);
  const double near_bottom = ((67.187563600 * r + 78.757757664) * r + 17.895169469) * r + 1.0;
  const double t = std::sqrt(-log_below_one(0.5 - distance)) - 1.6;
  const double far_top = ((0.17023821103 * t + 1.3067284816) * t + 2.7568153900) * t + 1.4234372777;
  const double far_bottom = (0.12021132975 * t + 0.73700164250) * t + 1.0;
  const bool near = distance <= 0.425;
  const double top = near ? near_top : (q < 0.0 ? -far_top : far_top);
  return top / (near ? near_bottom : far_bottom);
}

struct NormalKernel {
  SHOAL_INLINE static void run(uint64_t base, double mean, double deviation, float* value, uint32_t dim) {
    fill_row(base, value, dim, [=](uint32_t bits) SHOAL_INLINE_LAMBDA {
      return static_cast<float>(mean + deviation * normal_quantile(bits));
    });
  }
};

// The largest float below x.
float below(float x) {
  const auto bits = std::bit_cast<int32_t>(x);
  if (x == 0.0f) return -0x1p-149f;
  return std::bit_cast<float>(x > 0.0f ? bits - 1 : bits + 1);
}

Status refuse(const std::string& what, float seen, const std::string& allowed) {
  return Status(Code::bad_input, "init " + what + " is " + number_text(seen) + "; allowed: " + allowed);
}

Status check_finite(const std::string& what, float value) {
  return std::isfinite(value) ? Status() : refuse(what, value, "a finite number");
}

Status check_pair(const std::string& first, const std::string& second, const InitSpec& spec) {
  if (Status status = check_finite(first, spec.a); !status.ok()) return status;
  return check_finite(second, spec.b);
}

Status check_uniform(const InitSpec& spec) {
  if (Status status = check_pair("uniform: low", "uniform: high", spec); !status.ok()) return status;
  if (spec.b < spec.a) return refuse("uniform: high", spec.b, "low (" + number_text(spec.a) + ") or more");
  return check_finite("uniform: high - low", spec.b - spec.a);
}

Status check_normal(const InitSpec& spec) {
  if (Status status = check_pair("normal: mean", "normal: std", spec); !status.ok()) return status;
  if (spec.b < 0.0f) return refuse("normal: std", spec.b, "0 or more");
  // 6.3 standard deviations is the farthest value there is.
  return check_finite("normal: |mean| + 7 std", std::fabs(spec.a) + 7.0f * spec.b);
}

}  // namespace

Status check_init(const InitSpec& spec) {
  switch (spec.kind) {
    case InitKind::zeros: return {};
    case InitKind::constant: return check_finite("constant: value", spec.a);
    case InitKind::uniform: return check_uniform(spec);
    case InitKind::normal: return check_normal(spec);
  }
  return Status(Code::bad_input, "init kind is " + std::to_string(static_cast<unsigned>(spec.kind)) +
                                     "; allowed: 1 (zeros) to 4 (normal)");
}

void init_row(const InitSpec& spec, int64_t key, float* value, uint32_t dim) {
  const uint64_t base = mix64(spec.salt ^ mix64(static_cast<uint64_t>(key)));
  switch (spec.kind) {
    case InitKind::zeros: std::fill_n(value, dim, 0.0f); return;
    case InitKind::constant: std::fill_n(value, dim, spec.a); return;
    case InitKind::uniform: {
      const float top = spec.a < spec.b ? below(spec.b) : spec.a;
      run_clone<UniformKernel>(base, spec.a, spec.b - spec.a, top, value, dim);
      return;
    }
    case InitKind::normal:
      run_clone<NormalKernel>(base, static_cast<double>(spec.a), static_cast<double>(spec.b), value, dim);
      return;
  }
}

}  // namespace shoal
