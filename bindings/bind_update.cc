// Optimizer and initialiser settings for people, and under `_core.update` the kernels themselves: they
// are what the suites in tests/unit run against torch and NumPy.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <vector>

#include "base/hash.h"
#include "convert.h"
#include "update/init.h"
#include "update/optimizer.h"
#include "wire/codec.h"

namespace nb = nanobind;
using namespace shoal;

namespace {

template <typename Scalar>
using In = nb::ndarray<const Scalar, nb::c_contig, nb::device::cpu>;
using InOut = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

constexpr Names<OptimizerKind, 6> optimizer_names = {
    "optimizer kind", 1, {"sgd", "adagrad", "rowwise_adagrad", "adam", "adamw", "ftrl"}};
constexpr Names<InitKind, 4> init_names = {"init kind", 1, {"zeros", "constant", "uniform", "normal"}};

void require(bool holds, const std::string& message) {
  if (!holds) raise(Status(Code::bad_input, message));
}

// A fresh NumPy array, and where its elements lie.
template <typename Scalar>
struct Fresh {
  nb::object array;
  Scalar* data;
};

template <typename Scalar>
Fresh<Scalar> make_array(const char* dtype, const nb::tuple& shape) {
  nb::object array = nb::module_::import_("numpy").attr("empty")(shape, dtype);
  auto* data = nb::cast<nb::ndarray<Scalar>>(array).data();
  return {std::move(array), data};
}

void update_array(const OptimizerSpec& spec, float lr, InOut rows, In<float> grads, uint32_t dim) {
  check(check_optimizer(spec));
  const size_t count = rows.shape(0);
  const size_t width = size_t{dim} + state_floats(spec, dim);
  require(rows.shape(1) == width, "rows have " + std::to_string(rows.shape(1)) +
                                      " columns; allowed: " + std::to_string(width) + " (value and state)");
  require(grads.size() == count * dim, "grads have " + std::to_string(grads.size()) + " elements; allowed: " +
                                           std::to_string(count * dim) + " (rows x dim)");
  nb::gil_scoped_release release;
  std::vector<float*> pointers(count);
  std::vector<float*> scalars(count);  // the last column, where the state has one
  for (size_t i = 0; i < count; ++i) {
    pointers[i] = rows.data() + i * width;
    scalars[i] = pointers[i] + width - 1;
  }
  update_rows(spec, lr, pointers, scalars.data(), grads.data(), dim);
}

nb::object init_state_array(const OptimizerSpec& spec, uint32_t dim) {
  check(check_optimizer(spec));
  const uint32_t floats = state_floats(spec, dim);
  auto out = make_array<float>("float32", nb::make_tuple(floats));
  init_state(spec, out.data, out.data + floats - state_scalars(spec), dim);
  return out.array;
}

nb::object init_row_array(InitSpec spec, uint64_t seed, const std::string& name, int64_t key, uint32_t dim) {
  check(check_init(spec));
  spec.salt = mix64(seed ^ hash_name(name));
  auto out = make_array<float>("float32", nb::make_tuple(dim));
  init_row(spec, key, out.data, dim);
  return out.array;
}

nb::object encode_array(const std::string& name, In<float> values) {
  const Codec codec = codec_names.parse(name);
  require(values.ndim() == 2,
          "values have " + std::to_string(values.ndim()) + " dimensions; allowed: 2 (rows, dim)");
  const auto dim = static_cast<uint32_t>(values.shape(1));
  auto out = make_array<uint8_t>("uint8", nb::make_tuple(values.shape(0), encoded_bytes(codec, dim)));
  encode_rows(codec, values.data(), values.shape(0), dim, reinterpret_cast<std::byte*>(out.data));
  return out.array;
}

nb::object decode_array(const std::string& name, In<uint8_t> bytes, size_t rows, uint32_t dim) {
  const Codec codec = codec_names.parse(name);
  const size_t expected = rows * encoded_bytes(codec, dim);
  require(bytes.size() == expected, "encoded rows have " + std::to_string(bytes.size()) +
                                        " bytes; allowed: " + std::to_string(expected));
  auto out = make_array<float>("float32", nb::make_tuple(rows, dim));
  decode_rows(codec, reinterpret_cast<const std::byte*>(bytes.data()), rows, dim, out.data);
  return out.array;
}

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
      .def_rw("beta", &OptimizerSpec::beta)
      .def("check", [](const OptimizerSpec& self) { check(check_optimizer(self)); })
      .def(
          "state_floats", [](const OptimizerSpec& self, uint32_t dim) { return state_floats(self, dim); },
          nb::arg("dim"));
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
      .def_rw("b", &InitSpec::b)
      .def("check", [](const InitSpec& self) { check(check_init(self)); });
}

void bind_kernels(nb::module_ m) {
  m.def("update_rows", update_array, nb::arg("spec"), nb::arg("lr"), nb::arg("rows").noconvert(),
        nb::arg("grads").noconvert(), nb::arg("dim"));
  m.def("init_state", init_state_array, nb::arg("spec"), nb::arg("dim"));
  m.def("init_row", init_row_array, nb::arg("spec"), nb::arg("seed"), nb::arg("name"), nb::arg("key"),
        nb::arg("dim"));
  m.def("encode", encode_array, nb::arg("codec"), nb::arg("values").noconvert());
  m.def("decode", decode_array, nb::arg("codec"), nb::arg("data").noconvert(), nb::arg("rows"),
        nb::arg("dim"));
  m.def(
      "encodable_max", [](const std::string& codec) { return encodable_max(codec_names.parse(codec)); },
      nb::arg("codec"));
  m.def(
      "max_abs_bits", [](In<float> values) { return max_abs_bits(values.data(), values.size()); },
      nb::arg("values").noconvert());
  m.def(
      "same_layout", [](const OptimizerSpec& a, const OptimizerSpec& b) { return same_layout(a, b); },
      nb::arg("a"), nb::arg("b"));
}

}  // namespace

void bind_update(nb::module_& m) {
  bind_optimizer_spec(m);
  bind_init_spec(m);
  m.def("kernel_names", [] {
    const auto names = kernel_names();
    return std::vector<std::string>(names.begin(), names.end());
  });
  m.def("use_kernels", [](const std::string& name) { check(use_kernels(name)); }, nb::arg("name"));
  bind_kernels(m.def_submodule("update"));
}
