#include "base/grow_array.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <utility>

namespace shoal {
namespace {

constexpr size_t kPage = 4096;
// Above this an array is a mapping of its own; below, thousands of small tables share heap pages.
constexpr size_t kMappedMin = 256 * 1024;
// Above this the tail of a half-used huge page is small beside the array.
constexpr size_t kHugeMin = 4 * 1024 * 1024;

size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

}  // namespace

bool GrowArray::mapped() const { return capacity_ >= kMappedMin; }

GrowArray::~GrowArray() { reset(); }

GrowArray::GrowArray(GrowArray&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), capacity_(std::exchange(other.capacity_, 0)) {}

GrowArray& GrowArray::operator=(GrowArray&& other) noexcept {
  if (this != &other) {
    reset();
    data_ = std::exchange(other.data_, nullptr);
    capacity_ = std::exchange(other.capacity_, 0);
  }
  return *this;
}

void GrowArray::reset() {
  if (data_ == nullptr) {
    return;
  }
  if (mapped()) {
    munmap(data_, capacity_);
  } else {
    std::free(data_);
  }
  data_ = nullptr;
  capacity_ = 0;
}

bool GrowArray::reserve(size_t bytes) {
  if (bytes <= capacity_) {
    return true;
  }
  if (bytes < kMappedMin) {
    const size_t size = round_up(bytes, 64);
    auto* fresh = static_cast<std::byte*>(std::aligned_alloc(64, size));
    if (fresh == nullptr) {
      return false;
    }
    if (capacity_ > 0) {
      std::memcpy(fresh, data_, capacity_);
    }
    std::memset(fresh + capacity_, 0, size - capacity_);
    std::free(data_);
    data_ = fresh;
    capacity_ = size;
    return true;
  }
  const size_t size = round_up(bytes, kPage);
  void* fresh = MAP_FAILED;
  if (mapped()) {
    fresh = mremap(data_, capacity_, size, MREMAP_MAYMOVE);
    if (fresh == MAP_FAILED) {
      return false;
    }
  } else {
    fresh = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (fresh == MAP_FAILED) {
      return false;
    }
    if (capacity_ > 0) {
      std::memcpy(fresh, data_, capacity_);
    }
    std::free(data_);
  }
  data_ = static_cast<std::byte*>(fresh);
  capacity_ = size;
  if (size >= kHugeMin) {
    madvise(data_, capacity_, MADV_HUGEPAGE);  // a wish: without huge pages everything works, slower
  }
  return true;
}

}  // namespace shoal
