// Adam and AdamW as torch.optim has them: Adam adds weight decay to the gradient, AdamW shrinks the value by
// it and keeps it out of the moments. State: first moment (dim), second moment (dim), the row's count of
// touches (1). Every operation is in the order of torch's _single_tensor_adam.
#include <algorithm>
#include <cmath>

#include "update/row_kernel.h"

namespace shoal {
namespace {

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

  SHOAL_INLINE void operator()(float* __restrict value, float* __restrict first, float* touches,
                               const float* __restrict grad, uint32_t dim) {
    float* __restrict second = first + dim;
    bias.move_to(count_touch(touches), lr, beta1, beta2);
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

void update_adam(const OptimizerSpec& spec, float lr, const RowBatch& batch) {
  if (spec.weight_decay != 0.0f) {
    return step_rows(AdamStep<Decay::coupled>{lr, spec.beta1, spec.beta2, spec.eps, spec.weight_decay},
                     batch);
  }
  step_rows(AdamStep<Decay::none>{lr, spec.beta1, spec.beta2, spec.eps, 0.0f}, batch);
}

void update_adamw(const OptimizerSpec& spec, float lr, const RowBatch& batch) {
  const auto shrink =
      static_cast<float>(1.0 - static_cast<double>(lr) * static_cast<double>(spec.weight_decay));
  step_rows(AdamStep<Decay::decoupled>{lr, spec.beta1, spec.beta2, spec.eps, shrink}, batch);
}

uint32_t floats(const OptimizerSpec&, uint32_t dim) { return 2 * dim + 1; }

void init(const OptimizerSpec&, float* state, float* touches, uint32_t dim) {
  std::fill_n(state, 2 * size_t{dim}, 0.0f);
  *touches = 0.0f;
}

}  // namespace

const OptimizerOps adam_ops = {floats, init, update_adam};
const OptimizerOps adamw_ops = {floats, init, update_adamw};

}  // namespace shoal
