// Optimizer and initialiser settings, and which kernels this CPU has.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <vector>

#include "convert.h"
#include "update/init.h"
#include "update/optimizer.h"

namespace nb = nanobind;
using namespace shoal;

namespace {

constexpr Names<OptimizerKind, 6> optimizer_names = {
    "optimizer kind", 1, {"sgd", "adagrad", "rowwise_adagrad", "adam", "adamw", "ftrl"}};
constexpr Names<InitKind, 4> init_names = {"init kind", 1, {"zeros", "constant", "uniform", "normal"}};

void bind_optimizer_spec(nb::module_& m) {
  nb::class_<OptimizerSpec>(m, "OptimizerSpec")
      .def(
          "__init__",
          [](OptimizerSpec* self, const std::string& kind) {
            OptimizerSpec spec;
            spec.kind = optimizer_names.parse(kind);
            std::construct_at(self, spec);
          },
          nb::arg("kind"))
      .def_prop_rw(
          "kind", [](const OptimizerSpec& self) { return optimizer_names.name(self.kind); },
          [](OptimizerSpec& self, const std::string& kind) { self.kind = optimizer_names.parse(kind); })
      .def_rw("nesterov", &OptimizerSpec::nesterov)
      .def_rw("lr", &OptimizerSpec::lr)
      .def_rw("momentum", &OptimizerSpec::momentum)
      .def_rw("dampening", &OptimizerSpec::dampening)
      .def_rw("weight_decay", &OptimizerSpec::weight_decay)
      .def_rw("lr_decay", &OptimizerSpec::lr_decay)
      .def_rw("initial", &OptimizerSpec::initial)
      .def_rw("eps", &OptimizerSpec::eps)
      .def_rw("beta1", &OptimizerSpec::beta1)
      .def_rw("beta2", &OptimizerSpec::beta2)
      .def_rw("l1", &OptimizerSpec::l1)
      .def_rw("l2", &OptimizerSpec::l2)
      .def_rw("beta", &OptimizerSpec::beta);
}

void bind_init_spec(nb::module_& m) {
  nb::class_<InitSpec>(m, "InitSpec")
      .def(
          "__init__",
          [](InitSpec* self, const std::string& kind, float a, float b) {
            std::construct_at(self, InitSpec{init_names.parse(kind), a, b, 0});
          },
          nb::arg("kind"), nb::arg("a") = 0.0f, nb::arg("b") = 0.0f)
      .def_prop_rw(
          "kind", [](const InitSpec& self) { return init_names.name(self.kind); },
          [](InitSpec& self, const std::string& kind) { self.kind = init_names.parse(kind); })
      .def_rw("a", &InitSpec::a)
      .def_rw("b", &InitSpec::b);
}

}  // namespace

void bind_update(nb::module_& m) {
  bind_optimizer_spec(m);
  bind_init_spec(m);
  m.def("kernel_names", [] {
    const auto names = kernel_names();
    return std::vector<std::string>(names.begin(), names.end());
  });
}
