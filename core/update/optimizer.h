// Optimizers that run where the rows are. One file each; a row is stepped only when it is touched, and
// then exactly as a torch.optim instance that held this row alone would step it.
//
// A row is `dim` floats of value followed by its state in one slot: vectors of `dim` floats, and then at most
// one scalar, which may lie elsewhere: with it in the slot, rows would not end on a cache line.
// All kernels give the same bits on every CPU kind: plain IEEE operations in a fixed order, no
// contraction, no approximations, no libm; reductions run over a fixed tree of 16 lanes.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "base/status.h"

namespace shoal {

// The numbers travel on the wire and lie in checkpoints: never reuse one.
enum class OptimizerKind : uint8_t {
  sgd = 1,
  adagrad = 2,
  rowwise_adagrad = 3,
  adam = 4,
  adamw = 5,
  ftrl = 6,
};

// Hyper-parameters. A field that the kind does not use is zero. `lr` is the default; each push may
// bring its own.
struct OptimizerSpec {
  OptimizerKind kind = OptimizerKind::sgd;
  bool nesterov = false;      // sgd
  float lr = 0.0f;            // all (ftrl: alpha)
  float momentum = 0.0f;      // sgd
  float dampening = 0.0f;     // sgd
  float weight_decay = 0.0f;  // sgd, adagrad, rowwise_adagrad, adam (coupled), adamw (decoupled)
  float lr_decay = 0.0f;      // adagrad
  float initial = 0.0f;       // adagrad, rowwise_adagrad, ftrl: initial accumulator
  float eps = 0.0f;           // adagrad, rowwise_adagrad, adam, adamw
  // Doubles, because torch computes 1 - beta and the bias corrections in double.
  double beta1 = 0.0;  // adam, adamw
  double beta2 = 0.0;  // adam, adamw
  float l1 = 0.0f;     // ftrl
  float l2 = 0.0f;     // ftrl
  float beta = 0.0f;   // ftrl
};

// Whether the values are ones that the optimizer can run with (negative lr, beta outside [0, 1), ...).
Status check_optimizer(const OptimizerSpec& spec);

// Floats of state that go with a row, the scalar included. Depends on the kind and on which features the
// hyper-parameters switch on (momentum, dampening, lr_decay), so those may not change in the life of a table.
uint32_t state_floats(const OptimizerSpec& spec, uint32_t dim);
// Of these, how many are scalars: 0 or 1.
uint32_t state_scalars(const OptimizerSpec& spec);

// Whether a table made with `a` can go on with `b`: same kind and same state layout.
bool same_layout(const OptimizerSpec& a, const OptimizerSpec& b);

// Fills the state of a row that is being born. `scalar` is not looked at where the state has none.
void init_state(const OptimizerSpec& spec, float* state, float* scalar, uint32_t dim);

// One step on each of `rows.size()` rows; `grads` holds rows.size() x dim floats. A row appears once.
// `scalars` has the place of each row's, or is null where the state has none. `lr` replaces spec.lr. Rows may
// alias nothing.
void update_rows(const OptimizerSpec& spec, float lr, std::span<float* const> rows, float* const* scalars,
                 const float* grads, uint32_t dim);

// CPU kinds that kernels were compiled for and this machine can run: "default", "avx2", "avx512".
// The best is chosen at start; tests compare all of them bit for bit through `use_kernels`.
std::span<const char* const> kernel_names();
Status use_kernels(const std::string& name);  // "" = the best; not thread-safe, for tests and support

}  // namespace shoal
