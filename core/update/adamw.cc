// AdamW as torch.optim.AdamW: weight decay shrinks the value and stays out of the moments.
#include "update/adam_step.h"

namespace shoal {
namespace {

void update(const OptimizerSpec& spec, float lr, const RowBatch& batch) {
  const auto shrink =
      static_cast<float>(1.0 - static_cast<double>(lr) * static_cast<double>(spec.weight_decay));
  step_rows(AdamStep<Decay::decoupled>{lr, spec.beta1, spec.beta2, spec.eps, shrink}, batch);
}

}  // namespace

const OptimizerOps adamw_ops = {adam_floats, adam_init, update};

}  // namespace shoal
