// What the binding files share: the GIL, names of enums, and plain values for Python.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "errors.h"
#include "wire/codec.h"

namespace shoal {

// Runs `call` without the GIL.
template <typename Call>
auto without_gil(Call call) {
  nanobind::gil_scoped_release release;
  return call();
}

// Names by number; a number starts at `first` in its enum.
template <typename Enum, size_t count>
struct Names {
  const char* what;
  size_t first;
  std::array<const char*, count> names;

  std::string name(Enum value) const { return names.at(static_cast<size_t>(value) - first); }

  Enum parse(const std::string& name) const {
    std::string known;
    for (size_t i = 0; i < count; ++i) {
      if (name == names[i]) return static_cast<Enum>(i + first);
      known += std::string(i == 0 ? "" : ", ") + names[i];
    }
    raise(Status(Code::bad_input, std::string(what) + " is '" + name + "'; allowed: " + known));
  }
};

inline constexpr Names<Codec, 4> codec_names = {"codec", 0, {"fp32", "fp16", "bf16", "int8"}};

inline std::vector<std::byte> to_bytes(const nanobind::bytes& bytes) {
  const auto* data = reinterpret_cast<const std::byte*>(bytes.c_str());
  return {data, data + bytes.size()};
}

// Keeps `object` for as long as an array that is a view of it lives.
template <typename T>
nanobind::capsule capsule_of(T object) {
  auto owner = std::make_unique<T>(std::move(object));
  nanobind::capsule keep(owner.get(), [](void* p) noexcept { std::default_delete<T>()(static_cast<T*>(p)); });
  [[maybe_unused]] T* owned = owner.release();
  return keep;
}

inline nanobind::dict counts(std::initializer_list<std::pair<const char*, uint64_t>> all) {
  nanobind::dict dict;
  for (const auto& [name, count] : all) dict[name] = count;
  return dict;
}

}  // namespace shoal
