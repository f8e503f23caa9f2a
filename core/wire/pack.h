// Plain values one after the other in bytes, and out of them again: the bodies of small messages.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

namespace shoal {

template <typename T>
void pack(std::vector<std::byte>& out, const T* values, size_t count) {
  static_assert(std::is_trivially_copyable_v<T>);
  const size_t before = out.size();
  out.resize(before + count * sizeof(T));
  if (count > 0) std::memcpy(out.data() + before, values, count * sizeof(T));
}

// Takes `count` values from the front of `in`; false where there are not so many.
template <typename T>
bool unpack(std::span<const std::byte>& in, std::vector<T>& values, size_t count) {
  static_assert(std::is_trivially_copyable_v<T>);
  if (in.size() / sizeof(T) < count) return false;
  values.resize(count);
  if (count > 0) std::memcpy(values.data(), in.data(), count * sizeof(T));
  in = in.subspan(count * sizeof(T));
  return true;
}

template <typename T>
bool unpack(std::span<const std::byte>& in, T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  if (in.size() < sizeof(T)) return false;
  std::memcpy(&value, in.data(), sizeof(T));
  in = in.subspan(sizeof(T));
  return true;
}

}  // namespace shoal
