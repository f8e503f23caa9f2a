#include "update/optimizer.h"

#include <array>
#include <cassert>
#include <cmath>
#include <initializer_list>

#include "base/number_text.h"
#include "update/row_kernel.h"

namespace shoal {
namespace {

struct Named {
  const char* name;
  const OptimizerOps* ops;
};

// By OptimizerKind, which starts at 1. Adding an optimizer is adding a line here and to the fields below.
constexpr std::array<Named, 6> optimizers = {{
    {"sgd", &sgd_ops},
    {"adagrad", &adagrad_ops},
    {"rowwise_adagrad", &rowwise_adagrad_ops},
    {"adam", &adam_ops},
    {"adamw", &adamw_ops},
    {"ftrl", &ftrl_ops},
}};

bool is_known(OptimizerKind kind) {
  const auto number = static_cast<size_t>(kind);
  return number >= 1 && number <= optimizers.size();
}

const Named& named(OptimizerKind kind) {
  assert(is_known(kind));
  return optimizers[static_cast<size_t>(kind) - 1];
}

constexpr unsigned bits(std::initializer_list<OptimizerKind> kinds) {
  unsigned result = 0;
  for (const OptimizerKind kind : kinds) result |= 1u << static_cast<unsigned>(kind);
  return result;
}

struct Field {
  const char* name;
  float OptimizerSpec::* value;
  unsigned users;  // kinds that read it; for the others it is 0, so that equal tables have equal bytes
};

using enum OptimizerKind;
constexpr std::array<Field, 10> fields = {{
    {"lr", &OptimizerSpec::lr, bits({sgd, adagrad, rowwise_adagrad, adam, adamw, ftrl})},
    {"momentum", &OptimizerSpec::momentum, bits({sgd})},
    {"dampening", &OptimizerSpec::dampening, bits({sgd})},
    {"weight_decay", &OptimizerSpec::weight_decay, bits({sgd, adagrad, rowwise_adagrad, adam, adamw})},
    {"lr_decay", &OptimizerSpec::lr_decay, bits({adagrad})},
    {"initial", &OptimizerSpec::initial, bits({adagrad, rowwise_adagrad, ftrl})},
    {"eps", &OptimizerSpec::eps, bits({adagrad, rowwise_adagrad, adam, adamw})},
    {"l1", &OptimizerSpec::l1, bits({ftrl})},
    {"l2", &OptimizerSpec::l2, bits({ftrl})},
    {"beta", &OptimizerSpec::beta, bits({ftrl})},
}};

Status refuse(const OptimizerSpec& spec, const std::string& field, const std::string& seen,
              const std::string& allowed) {
  return Status(Code::bad_input, std::string("optimizer ") + named(spec.kind).name + ": " + field + " is " +
                                     seen + "; allowed: " + allowed);
}

Status check_field(const OptimizerSpec& spec, const Field& field) {
  const float value = spec.*field.value;
  if ((field.users & bits({spec.kind})) == 0) {
    if (value == 0.0f) return {};
    return refuse(spec, field.name, number_text(value), "0, as this optimizer does not use it");
  }
  if (!std::isfinite(value)) return refuse(spec, field.name, number_text(value), "a finite number");
  // torch takes any dampening, also a negative one.
  if (value < 0.0f && field.value != &OptimizerSpec::dampening)
    return refuse(spec, field.name, number_text(value), "0 or more");
  return {};
}

Status check_beta(const OptimizerSpec& spec, const char* name, double value) {
  const bool used = spec.kind == OptimizerKind::adam || spec.kind == OptimizerKind::adamw;
  if (!used && value != 0.0)
    return refuse(spec, name, number_text(value), "0, as this optimizer does not use it");
  if (!(value >= 0.0 && value < 1.0)) return refuse(spec, name, number_text(value), "0 or more and below 1");
  return {};
}

Status check_nesterov(const OptimizerSpec& spec) {
  if (!spec.nesterov) return {};
  if (spec.kind != OptimizerKind::sgd)
    return refuse(spec, "nesterov", "true", "false, as this optimizer does not use it");
  if (spec.momentum == 0.0f) return refuse(spec, "momentum", "0", "above 0 where nesterov is true");
  if (spec.dampening != 0.0f)
    return refuse(spec, "dampening", number_text(spec.dampening), "0 where nesterov is true");
  return {};
}

}  // namespace

Status check_optimizer(const OptimizerSpec& spec) {
  if (!is_known(spec.kind)) {
    return Status(Code::bad_input, "optimizer kind is " + std::to_string(static_cast<unsigned>(spec.kind)) +
                                       "; allowed: 1 (sgd) to " + std::to_string(optimizers.size()) +
                                       " (ftrl)");
  }
  for (const Field& field : fields)
    if (Status status = check_field(spec, field); !status.ok()) return status;
  if (Status status = check_beta(spec, "beta1", spec.beta1); !status.ok()) return status;
  if (Status status = check_beta(spec, "beta2", spec.beta2); !status.ok()) return status;
  if (spec.kind == OptimizerKind::ftrl && spec.lr == 0.0f)
    return refuse(spec, "lr", "0", "above 0, as ftrl divides by it");
  return check_nesterov(spec);
}

uint32_t state_floats(const OptimizerSpec& spec, uint32_t dim) {
  return named(spec.kind).ops->state_floats(spec, dim);
}

bool same_layout(const OptimizerSpec& a, const OptimizerSpec& b) {
  // No two layouts of one kind have the same size at dim 2.
  return a.kind == b.kind && state_floats(a, 2) == state_floats(b, 2);
}

uint32_t state_scalars(const OptimizerSpec& spec) {
  return state_floats(spec, 2) % 2;  // vectors of 2 are even
}

void init_state(const OptimizerSpec& spec, float* state, float* scalar, uint32_t dim) {
  named(spec.kind).ops->init_state(spec, state, scalar, dim);
}

void update_rows(const OptimizerSpec& spec, float lr, std::span<float* const> rows, float* const* scalars,
                 const float* grads, uint32_t dim) {
  const uint32_t floats = dim + state_floats(spec, dim) - state_scalars(spec);
  const RowBatch batch = {rows.data(), state_scalars(spec) == 0 ? nullptr : scalars, rows.size(), grads, dim,
                          floats};
  named(spec.kind).ops->update(spec, lr, batch);
}

std::span<const char* const> kernel_names() {
  return std::span(cpu_kind_names).first(static_cast<size_t>(best_cpu_kind()) + 1);
}

Status use_kernels(const std::string& name) {
  if (name.empty()) {
    cpu_kind_in_use = best_cpu_kind();
    return {};
  }
  std::string known;
  const auto names = kernel_names();
  for (size_t kind = 0; kind < names.size(); ++kind) {
    if (name == names[kind]) {
      cpu_kind_in_use = static_cast<CpuKind>(kind);
      return {};
    }
    known += std::string(kind == 0 ? "" : ", ") + names[kind];
  }
  return Status(Code::bad_input,
                "kernels are '" + name + "'; allowed on this machine: " + known + ", or '' for the best");
}

}  // namespace shoal
