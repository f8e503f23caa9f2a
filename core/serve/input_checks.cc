// The checks that stand before every request.
#include <bit>
#include <cmath>
#include <string>

#include "serve/store_client.h"

namespace shoal {
namespace {

constexpr uint32_t kInfinityBits = 0x7f800000u;

// Names the first row that cannot be sent and counts all of them.
Status name_the_bad(const std::string& what, std::span<const int64_t> keys, const float* values,
                    size_t row_floats, float limit, bool finite) {
  size_t bad = 0;
  int64_t first = 0;
  float seen = 0.0f;
  const size_t rows = keys.empty() ? 1 : keys.size();
  for (size_t row = 0; row < rows; ++row) {
    for (size_t i = 0; i < row_floats; ++i) {
      const float x = values[row * row_floats + i];
      if (!std::isfinite(x) || std::fabs(x) > limit) {
        if (bad == 0) {
          first = keys.empty() ? static_cast<int64_t>(i) : keys[row];
          seen = x;
        }
        ++bad;
        if (!keys.empty()) {
          break;  // count rows
        }
      }
    }
  }
  const std::string unit = keys.empty() ? "element " : "key ";
  const std::string units = keys.empty() ? " elements" : " rows";
  std::string text = what + ": " + std::to_string(bad) + " of " +
                     std::to_string(keys.empty() ? row_floats : rows) + units + " cannot be sent, first " +
                     unit + std::to_string(first) + " with the value " + std::to_string(seen) + "; ";
  text += finite ? "it is too large for this wire format: use wire='fp32' or 'bf16', or scale the gradient"
                 : "every value must be finite: check the loss for NaN, or clip the gradient";
  return {Code::bad_input, text};
}

}  // namespace

Status check_out(const std::string& what, const OutMemory& out, size_t floats) {
  if (out.floats.data() != nullptr && out.floats.size() != floats) {
    return {Code::bad_input, what + ": out= has " + std::to_string(out.floats.size()) + " elements; " +
                                 std::to_string(floats) + " are needed"};
  }
  return {};
}

FiniteCheck check_finite(const std::string& what, std::span<const int64_t> keys, const float* values,
                         size_t row_floats, Codec codec) {
  const size_t count = (keys.empty() ? 1 : keys.size()) * row_floats;
  const uint32_t bits = max_abs_bits(values, count);
  const float limit = encodable_max(codec);
  const float largest = std::bit_cast<float>(bits);
  if (bits >= kInfinityBits || largest > limit) {
    return {name_the_bad(what, keys, values, row_floats, limit, bits < kInfinityBits), false};
  }
  // At most keys.size() values are summed into one.
  const double bound = static_cast<double>(largest) * static_cast<double>(keys.empty() ? 1 : keys.size());
  return {{}, bound <= static_cast<double>(limit)};
}

}  // namespace shoal
