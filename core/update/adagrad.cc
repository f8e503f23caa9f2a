// Adagrad as torch.optim.Adagrad. State: the sum of squares (dim), then, where lr_decay is on, the
// row's count of touches.
#include <algorithm>
#include <cmath>

#include "update/row_kernel.h"

namespace shoal {
namespace {

template <bool decays>
struct AdagradStep {
  float lr;
  float lr_decay;
  float eps;
  float decay;

  SHOAL_INLINE void operator()(float* __restrict value, float* __restrict sum, float* touches,
                               const float* __restrict grad, uint32_t dim) const {
    float rate = lr;
    if (lr_decay != 0.0f) {
      const double past = count_touch(touches) - 1;
      rate = static_cast<float>(static_cast<double>(lr) / (1.0 + past * static_cast<double>(lr_decay)));
    }
#pragma GCC ivdep
    for (uint32_t i = 0; i < dim; ++i) {
      float g = grad[i];
      if constexpr (decays) g = g + decay * value[i];
      const float s = sum[i] + g * g;
      sum[i] = s;
      value[i] = value[i] - rate * g / (std::sqrt(s) + eps);
    }
  }
};

void update(const OptimizerSpec& spec, float lr, const RowBatch& batch) {
  if (spec.weight_decay != 0.0f)
    return step_rows(AdagradStep<true>{lr, spec.lr_decay, spec.eps, spec.weight_decay}, batch);
  step_rows(AdagradStep<false>{lr, spec.lr_decay, spec.eps, 0.0f}, batch);
}

uint32_t floats(const OptimizerSpec& spec, uint32_t dim) { return dim + (spec.lr_decay != 0.0f ? 1 : 0); }

void init(const OptimizerSpec& spec, float* state, float* touches, uint32_t dim) {
  std::fill_n(state, dim, spec.initial);
  if (spec.lr_decay != 0.0f) *touches = 0.0f;
}

}  // namespace

const OptimizerOps adagrad_ops = {floats, init, update};

}  // namespace shoal
