// Adam as torch.optim.Adam: weight decay is added to the gradient.
#include "update/adam_step.h"

namespace shoal {
namespace {

void update(const OptimizerSpec& spec, float lr, const RowBatch& batch) {
  if (spec.weight_decay != 0.0f) {
    return step_rows(AdamStep<Decay::coupled>{lr, spec.beta1, spec.beta2, spec.eps, spec.weight_decay},
                     batch);
  }
  step_rows(AdamStep<Decay::none>{lr, spec.beta1, spec.beta2, spec.eps, 0.0f}, batch);
}

}  // namespace

const OptimizerOps adam_ops = {adam_floats, adam_init, update};

}  // namespace shoal
