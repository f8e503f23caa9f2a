// SGD as torch.optim.SGD: momentum, dampening, Nesterov, weight decay.
// State: the momentum buffer (dim) where momentum is on, then one flag where dampening is on too:
// torch's first step sets the buffer to the whole gradient, undamped, so a row must know its first touch.
#include <algorithm>

#include "update/row_kernel.h"

namespace shoal {
namespace {

enum class Momentum { none, plain, nesterov };

bool has_buffer(const OptimizerSpec& spec) { return spec.momentum != 0.0f; }
bool has_flag(const OptimizerSpec& spec) { return has_buffer(spec) && spec.dampening != 0.0f; }

template <bool decays, Momentum mode>
struct SgdStep {
  float lr;
  float momentum;
  float take;  // 1 - dampening
  float decay;
  bool flagged;

  SHOAL_INLINE void operator()(float* __restrict value, float* __restrict buffer, float* flag,
                               const float* __restrict grad, uint32_t dim) const {
    float share = take;
    if (mode != Momentum::none && flagged && *flag == 0.0f) {
      *flag = 1.0f;
      share = 1.0f;
    }
#pragma GCC ivdep
    for (uint32_t i = 0; i < dim; ++i) {
      float g = grad[i];
      if constexpr (decays) g = g + decay * value[i];
      if constexpr (mode != Momentum::none) {
        const float b = momentum * buffer[i] + share * g;
        buffer[i] = b;
        g = mode == Momentum::nesterov ? g + momentum * b : b;
      }
      value[i] = value[i] - lr * g;
    }
  }
};

template <bool decays, Momentum mode>
void run(const OptimizerSpec& spec, float lr, const RowBatch& batch) {
  const auto take = static_cast<float>(1.0 - static_cast<double>(spec.dampening));
  step_rows(SgdStep<decays, mode>{lr, spec.momentum, take, spec.weight_decay, has_flag(spec)}, batch);
}

template <bool decays>
void run_mode(const OptimizerSpec& spec, float lr, const RowBatch& batch) {
  if (!has_buffer(spec)) return run<decays, Momentum::none>(spec, lr, batch);
  if (spec.nesterov) return run<decays, Momentum::nesterov>(spec, lr, batch);
  run<decays, Momentum::plain>(spec, lr, batch);
}

void update(const OptimizerSpec& spec, float lr, const RowBatch& batch) {
  if (spec.weight_decay != 0.0f) return run_mode<true>(spec, lr, batch);
  run_mode<false>(spec, lr, batch);
}

uint32_t floats(const OptimizerSpec& spec, uint32_t dim) {
  return (has_buffer(spec) ? dim : 0) + (has_flag(spec) ? 1 : 0);
}

void init(const OptimizerSpec& spec, float* state, float* flag, uint32_t dim) {
  if (has_buffer(spec)) std::fill_n(state, dim, 0.0f);
  if (has_flag(spec)) *flag = 0.0f;
}

}  // namespace

const OptimizerOps sgd_ops = {floats, init, update};

}  // namespace shoal
