// FTRL-proximal (McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013, algorithm 1),
// with alpha = lr. State: z (dim), then n (dim), the sum of squared gradients.
//
// The value is a function of (z, n): the first touch replaces an initial value that is not zero.
#include <algorithm>
#include <cmath>

#include "update/row_kernel.h"

namespace shoal {
namespace {

struct FtrlStep {
  float per_alpha;  // 1 / alpha
  float beta;
  float l1;
  float l2;

  SHOAL_INLINE void operator()(float* __restrict value, float* __restrict z, float* /*scalar*/,
                               const float* __restrict grad, uint32_t dim) const {
    float* __restrict n = z + dim;
#pragma GCC ivdep
    for (uint32_t i = 0; i < dim; ++i) {
      const float g = grad[i];
      const float square = g * g;
      const float sum = n[i] + square;
      const float root = std::sqrt(sum);
      // The paper's sqrt(n + g^2) - sqrt(n), without its cancellation: g^2 over the sum of the roots.
      const float roots = root + std::sqrt(n[i]);
      const float sigma = square / (roots > 0.0f ? roots : 1.0f) * per_alpha;
      const float moved = z[i] + (g - sigma * value[i]);
      z[i] = moved;
      n[i] = sum;
      const float excess = moved > 0.0f ? moved - l1 : moved + l1;
      const float stiffness = (beta + root) * per_alpha + l2;
      const bool active = std::fabs(moved) > l1 && stiffness > 0.0f;
      value[i] = active ? -excess / stiffness : 0.0f;
    }
  }
};

void update(const OptimizerSpec& spec, float lr, const RowBatch& batch) {
  // A rate of 0 (a warm-up's first step) means "do not move", as with the others; the formula divides by it.
  if (lr == 0.0f) return;
  const auto per_alpha = static_cast<float>(1.0 / static_cast<double>(lr));
  step_rows(FtrlStep{per_alpha, spec.beta, spec.l1, spec.l2}, batch);
}

uint32_t floats(const OptimizerSpec&, uint32_t dim) { return 2 * dim; }

void init(const OptimizerSpec& spec, float* state, float* /*scalar*/, uint32_t dim) {
  std::fill_n(state, dim, 0.0f);
  std::fill_n(state + dim, dim, spec.initial);
}

}  // namespace

const OptimizerOps ftrl_ops = {floats, init, update};

}  // namespace shoal
