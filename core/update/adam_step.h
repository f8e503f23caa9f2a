// The step that Adam and AdamW share, private to core/update. State: first moment (dim), second moment
// (dim), the row's count of touches (1). Every operation is in the order of torch's _single_tensor_adam.
#pragma once

#include <algorithm>
#include <cmath>

#include "update/row_kernel.h"

namespace shoal {

// base^exponent by repeated squaring: the same bits everywhere, which libm's pow does not promise.
SHOAL_INLINE double power(double base, uint32_t exponent) {
  double result = 1.0;
  for (; exponent != 0; exponent >>= 1) {
    if ((exponent & 1) != 0) result *= base;
    base *= base;
  }
  return result;
}

// The corrections of one step count. Rows of a batch often share it, so the last one is kept.
struct BiasCorrection {
  uint32_t step = 0;
  float rate = 0.0f;  // lr / (1 - beta1^step)
  float root = 0.0f;  // sqrt(1 - beta2^step)

  SHOAL_INLINE void move_to(uint32_t to, double lr, double beta1, double beta2) {
    if (to == step) return;
    step = to;
    rate = static_cast<float>(lr / (1.0 - power(beta1, to)));
    root = static_cast<float>(std::sqrt(1.0 - power(beta2, to)));
  }
};

// What weight decay acts on: nothing, the gradient (Adam), the value itself (AdamW).
enum class Decay { none, coupled, decoupled };

template <Decay mode>
struct AdamStep {
  double lr;
  double beta1;
  double beta2;
  float eps;
  float decay;  // coupled: weight_decay; decoupled: 1 - lr * weight_decay
  BiasCorrection bias = {};

  SHOAL_INLINE void operator()(float* __restrict value, float* __restrict first, const float* __restrict grad,
                               uint32_t dim) {
    float* __restrict second = first + dim;
    bias.move_to(count_touch(second + dim), lr, beta1, beta2);
    const float rate = bias.rate;
    const float root = bias.root;
    const auto weight = static_cast<float>(1.0 - beta1);
    // torch's lerp goes from the nearer end: from the moment, or for beta1 <= 0.5 from the gradient.
    const bool from_moment = weight < 0.5f;
    const float slope = from_moment ? weight : weight - 1.0f;
    const auto keep = static_cast<float>(beta2);
    const auto take = static_cast<float>(1.0 - beta2);
#pragma GCC ivdep
    for (uint32_t i = 0; i < dim; ++i) {
      float w = value[i];
      float g = grad[i];
      if constexpr (mode == Decay::coupled) g = g + decay * w;
      if constexpr (mode == Decay::decoupled) w = w * decay;
      const float m = (from_moment ? first[i] : g) + slope * (g - first[i]);
      const float v = second[i] * keep + take * g * g;
      first[i] = m;
      second[i] = v;
      value[i] = w - rate * m / (std::sqrt(v) / root + eps);
    }
  }
};

inline uint32_t adam_floats(const OptimizerSpec&, uint32_t dim) { return 2 * dim + 1; }

inline void adam_init(const OptimizerSpec&, float* state, uint32_t dim) {
  std::fill_n(state, 2 * size_t{dim} + 1, 0.0f);
}

}  // namespace shoal
