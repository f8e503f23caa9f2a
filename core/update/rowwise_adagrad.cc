// Row-wise Adagrad: one accumulator for the whole row, fed with the mean of the squared gradient.
// State: 1 float, so a table of dim 64 costs 1/64 of Adagrad's state. Torch has no twin; the rule is
// that of FBGEMM's EXACT_ROWWISE_ADAGRAD.
#include <cmath>
#include <cstring>

#include "update/row_kernel.h"

namespace shoal {
namespace {

// Four lanes are a register on every CPU kind; left to the vectoriser, sixteen floats of a local array
// go through memory at each turn.
using Lanes4 = float __attribute__((vector_size(16)));

SHOAL_INLINE Lanes4 load(const float* from) {
  Lanes4 lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

template <bool decays>
struct RowwiseAdagradStep {
  float lr;
  float eps;
  float decay;

  SHOAL_INLINE void operator()(float* __restrict value, float* /*state*/, float* __restrict sum,
                               const float* __restrict grad, uint32_t dim) const {
    *sum = *sum + sum_squares(grad, value, dim) / static_cast<float>(dim);
    // One division for the row instead of one per element; it rounds once more, within 1 ulp.
    const float rate = lr / (std::sqrt(*sum) + eps);
#pragma GCC ivdep
    for (uint32_t i = 0; i < dim; ++i) {
      float g = grad[i];
      if constexpr (decays) g = g + decay * value[i];
      value[i] = value[i] - rate * g;
    }
  }

  // In an order that no vector width changes: element i goes to lane i % 16, then the lanes fold in halves.
  SHOAL_INLINE float sum_squares(const float* grad, const float* value, uint32_t dim) const {
    Lanes4 lanes[4] = {};
    uint32_t i = 0;
    for (; i + 16 <= dim; i += 16) {
      lanes[0] += squares(grad + i, value + i);
      lanes[1] += squares(grad + i + 4, value + i + 4);
      lanes[2] += squares(grad + i + 8, value + i + 8);
      lanes[3] += squares(grad + i + 12, value + i + 12);
    }
    for (uint32_t part = 0; i < dim; ++part, i += 4)
      lanes[part] += dim - i >= 4 ? squares(grad + i, value + i) : squares_cut(grad + i, value + i, dim - i);
    const Lanes4 fold = (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
    return (fold[0] + fold[2]) + (fold[1] + fold[3]);
  }

  SHOAL_INLINE Lanes4 squares(const float* grad, const float* value) const {
    Lanes4 g = load(grad);
    if constexpr (decays) g = g + decay * load(value);
    return g * g;
  }

  // The last 1 to 3 elements, with zeros behind them.
  SHOAL_INLINE Lanes4 squares_cut(const float* grad, const float* value, uint32_t count) const {
    const auto cut = [count](const float* from) SHOAL_INLINE_LAMBDA {
      return Lanes4{from[0], count > 1 ? from[1] : 0.0f, count > 2 ? from[2] : 0.0f, 0.0f};
    };
    Lanes4 g = cut(grad);
    if constexpr (decays) g = g + decay * cut(value);
    return g * g;
  }
};

void update(const OptimizerSpec& spec, float lr, const RowBatch& batch) {
  if (spec.weight_decay != 0.0f)
    return step_rows(RowwiseAdagradStep<true>{lr, spec.eps, spec.weight_decay}, batch);
  step_rows(RowwiseAdagradStep<false>{lr, spec.eps, 0.0f}, batch);
}

uint32_t floats(const OptimizerSpec&, uint32_t) { return 1; }

void init(const OptimizerSpec& spec, float* /*state*/, float* sum, uint32_t) { *sum = spec.initial; }

}  // namespace

const OptimizerOps rowwise_adagrad_ops = {floats, init, update};

}  // namespace shoal
