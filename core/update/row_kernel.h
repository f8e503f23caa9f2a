// What the optimizers share, private to core/update: the loop over rows, step counters, and the table
// through which optimizer.cc reaches each optimizer.
//
// An optimizer is a `Step` functor: operator()(value, state, scalar, grad, dim) steps one row. RowsKernel
// runs it over a batch, fetching rows ahead, because rows lie anywhere in memory and each is touched once.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "base/cpu_clones.h"
#include "update/optimizer.h"

namespace shoal {

struct RowBatch {
  float* const* rows;
  float* const* scalars;  // null: the state has none
  size_t count;
  const float* grads;  // count x dim
  uint32_t dim;
  uint32_t row_floats;  // of a slot: value and state
};

// How optimizer.cc sees one optimizer; the settings were checked before.
struct OptimizerOps {
  uint32_t (*state_floats)(const OptimizerSpec& spec, uint32_t dim);
  void (*init_state)(const OptimizerSpec& spec, float* state, float* scalar, uint32_t dim);
  void (*update)(const OptimizerSpec& spec, float lr, const RowBatch& batch);
};

extern const OptimizerOps sgd_ops;
extern const OptimizerOps adagrad_ops;
extern const OptimizerOps rowwise_adagrad_ops;
extern const OptimizerOps adam_ops;
extern const OptimizerOps adamw_ops;
extern const OptimizerOps ftrl_ops;

inline constexpr size_t line_bytes = 64;
// Lines asked for ahead: about as many as a core can have in flight. More only wait in the queue.
inline constexpr size_t lines_ahead_max = 32;
// From a longer row only its head is asked for; the hardware follows the stream by itself.
inline constexpr size_t lines_per_row_max = 16;

SHOAL_INLINE void prefetch_row(const float* row, size_t lines) {
  const char* head = reinterpret_cast<const char*>(row);
  for (size_t line = 0; line < lines; ++line) __builtin_prefetch(head + line * line_bytes, 1, 3);
}

template <typename Step>
struct RowsKernel {
  SHOAL_INLINE static void run(Step step, RowBatch batch) {
    const size_t row_bytes = size_t{4} * batch.row_floats;
    const size_t lines = std::clamp<size_t>((row_bytes + line_bytes - 1) / line_bytes, 1, lines_per_row_max);
    const size_t ahead = std::max<size_t>(lines_ahead_max / lines, 2);
    for (size_t i = 0; i < std::min(ahead, batch.count); ++i) prefetch_row(batch.rows[i], lines);
    for (size_t i = 0; i < batch.count; ++i) {
      if (i + ahead < batch.count) prefetch_row(batch.rows[i + ahead], lines);
      float* row = batch.rows[i];
      float* scalar = batch.scalars == nullptr ? nullptr : batch.scalars[i];
      step(row, row + batch.dim, scalar, batch.grads + i * batch.dim, batch.dim);
    }
  }
};

template <typename Step>
void step_rows(Step step, const RowBatch& batch) {
  run_clone<RowsKernel<Step>>(step, batch);
}

// A row's count of touches is the bit pattern of a u32 in the scalar of its state. It stops at the top
// rather than start again, for a count of 0 would undo the bias correction.
SHOAL_INLINE uint32_t count_touch(float* counter) {
  uint32_t count = std::bit_cast<uint32_t>(*counter);
  if (count != UINT32_MAX) ++count;
  *counter = std::bit_cast<float>(count);
  return count;
}

}  // namespace shoal
