// The kernels themselves under `_core.update`: what the suites in tests/unit run against torch and NumPy.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

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
}  // namespace

void bind_kernels(nb::module_& parent) {
  nb::module_ m = parent.def_submodule("update", "The kernels, for tests.");
  m.def("use_kernels", [](const std::string& name) { check(use_kernels(name)); }, nb::arg("name"));
  m.def("check", [](const OptimizerSpec& spec) { check(check_optimizer(spec)); }, nb::arg("spec"));
  m.def("check", [](const InitSpec& spec) { check(check_init(spec)); }, nb::arg("spec"));
  m.def("state_floats", &state_floats, nb::arg("spec"), nb::arg("dim"));
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
