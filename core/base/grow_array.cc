#include "base/grow_array.h"

#include <sys/mman.h>

#include <cstdint>
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

constexpr size_t kHugePage = 2 * 1024 * 1024;

// TSan does not see mremap: it would blame whoever is given the address of pages that moved away.
#ifdef __SANITIZE_THREAD__
constexpr bool kMovesPages = false;
#else
constexpr bool kMovesPages = true;
#endif

size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

void* map_anonymous(size_t bytes, int protection) {
  return mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

// Address space for `bytes` that begins on a huge page, not yet usable; null when there is none.
std::byte* reserve_aligned(size_t bytes) {
  void* wide = map_anonymous(bytes + kHugePage, PROT_NONE);
  if (wide == MAP_FAILED) return nullptr;
  auto* begin = static_cast<std::byte*>(wide);
  auto* aligned = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<uintptr_t>(begin), kHugePage));
  if (aligned != begin) {
    munmap(begin, static_cast<size_t>(aligned - begin));
  }
  const size_t behind = kHugePage - static_cast<size_t>(aligned - begin);
  munmap(aligned + bytes, behind);
  return aligned;
}

}  // namespace

GrowArray::~GrowArray() { reset(); }

GrowArray::GrowArray(GrowArray&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      capacity_(std::exchange(other.capacity_, 0)),
      mapped_(other.mapped_) {}

GrowArray& GrowArray::operator=(GrowArray&& other) noexcept {
  if (this != &other) {
    reset();
    data_ = std::exchange(other.data_, nullptr);
    capacity_ = std::exchange(other.capacity_, 0);
    mapped_ = other.mapped_;
  }
  return *this;
}

void GrowArray::reset() {
  if (data_ == nullptr) return;
  if (mapped_) {
    munmap(data_, capacity_);
  } else {
    std::free(data_);
  }
  data_ = nullptr;
  capacity_ = 0;
}

bool GrowArray::reserve(size_t bytes) {
  if (bytes <= capacity_) return true;
  return bytes < kMappedMin ? grow_heap(bytes) : bytes < kHugeMin ? grow_mapped(bytes) : grow_huge(bytes);
}

bool GrowArray::grow_heap(size_t bytes) {
  const size_t size = round_up(bytes, 64);
  auto* fresh = static_cast<std::byte*>(std::aligned_alloc(64, size));
  if (fresh == nullptr) return false;
  std::memset(fresh + capacity_, 0, size - capacity_);
  move_to(fresh, size, false);
  return true;
}

bool GrowArray::grow_mapped(size_t bytes) {
  const size_t size = round_up(bytes, kPage);
  if (!mapped_ || !kMovesPages) {
    void* fresh = map_anonymous(size, PROT_READ | PROT_WRITE);
    if (fresh == MAP_FAILED) return false;
    move_to(static_cast<std::byte*>(fresh), size, true);
    return true;
  }
  void* moved = mremap(data_, capacity_, size, MREMAP_MAYMOVE);
  if (moved == MAP_FAILED) return false;
  data_ = static_cast<std::byte*>(moved);
  capacity_ = size;
  return true;
}

// Begins on a huge page and stays so when it moves: the kernel then moves whole huge pages. The content
// of a smaller array is copied once, since its pages are small ones.
bool GrowArray::grow_huge(size_t bytes) {
  const size_t size = round_up(bytes, kHugePage);
  std::byte* place = reserve_aligned(size);
  if (place == nullptr) return false;
  if (mapped_ && capacity_ >= kHugeMin && kMovesPages) {
    if (mremap(data_, capacity_, size, MREMAP_MAYMOVE | MREMAP_FIXED, place) == MAP_FAILED) {
      munmap(place, size);
      return false;
    }
    data_ = place;
    capacity_ = size;
    return true;
  }
  if (mprotect(place, size, PROT_READ | PROT_WRITE) != 0) {
    munmap(place, size);
    return false;
  }
  madvise(place, size, MADV_HUGEPAGE);  // a wish: without huge pages everything works, slower
  move_to(place, size, true);
  return true;
}

void GrowArray::move_to(std::byte* place, size_t size, bool mapped) {
  if (capacity_ > 0) {
    std::memcpy(place, data_, capacity_);
  }
  reset();
  data_ = place;
  capacity_ = size;
  mapped_ = mapped;
}

}  // namespace shoal
