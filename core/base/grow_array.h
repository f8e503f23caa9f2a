// One contiguous, 64-byte-aligned array of bytes that grows in place where the kernel can move pages
// instead of copying them. Small arrays are ordinary heap memory; large ones are mappings, grown by
// mremap, and ask for huge pages. New bytes are zero.
//
// Not thread-safe. Growing moves the array: pointers into it live only until the next `resize`.
#pragma once

#include <cstddef>
#include <utility>

namespace shoal {

constexpr size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

class GrowArray {
 public:
  GrowArray() = default;
  ~GrowArray() { reset(); }
  GrowArray(GrowArray&& other) noexcept { *this = std::move(other); }
  GrowArray& operator=(GrowArray&& other) noexcept;

  std::byte* data() { return data_; }
  const std::byte* data() const { return data_; }
  size_t capacity() const { return capacity_; }

  // Grows to at least `bytes`, keeping the content. Never shrinks. False when memory is exhausted; the
  // array is then as it was.
  [[nodiscard]] bool reserve(size_t bytes);
  void reset();

 private:
  bool grow_heap(size_t bytes);
  bool grow_mapped(size_t bytes);
  void move_to(std::byte* place, size_t size, bool mapped);

  std::byte* data_ = nullptr;
  size_t capacity_ = 0;
  bool mapped_ = false;  // a mapping of its own; heap memory otherwise
};

}  // namespace shoal
