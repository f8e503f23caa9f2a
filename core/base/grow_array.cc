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

// Address space for `bytes` that begins at a multiple of `unit`, not yet usable; null when there is none.
std::byte* reserve_aligned(size_t bytes, size_t unit) {
  const size_t spare = unit - kPage;
  void* wide = mmap(nullptr, bytes + spare, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (wide == MAP_FAILED) return nullptr;
  auto* begin = static_cast<std::byte*>(wide);
  auto* aligned = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<uintptr_t>(begin), unit));
  const auto before = static_cast<size_t>(aligned - begin);
  if (before > 0) munmap(begin, before);
  if (before < spare) munmap(aligned + bytes, spare - before);
  return aligned;
}

}  // namespace

GrowArray& GrowArray::operator=(GrowArray&& other) noexcept {
  if (this != &other) {
    reset();
    data_ = std::exchange(other.data_, nullptr);
    capacity_ = std::exchange(other.capacity_, 0);
    mapped_ = std::exchange(other.mapped_, false);
  }
  return *this;
}

void GrowArray::reset() {
  if (data_ == nullptr) return;
  if (mapped_)
    munmap(data_, capacity_);
  else
    std::free(data_);
  data_ = nullptr;
  capacity_ = 0;
  mapped_ = false;
}

bool GrowArray::reserve(size_t bytes) {
  if (bytes <= capacity_) return true;
  return bytes < kMappedMin ? grow_heap(bytes) : grow_mapped(bytes);
}

bool GrowArray::grow_heap(size_t bytes) {
  const size_t size = round_up(bytes, 64);
  auto* fresh = static_cast<std::byte*>(std::aligned_alloc(64, size));
  if (fresh == nullptr) return false;
  std::memset(fresh + capacity_, 0, size - capacity_);
  move_to(fresh, size, false);
  return true;
}

// A large array begins on a huge page and stays so when it moves: the kernel then moves whole huge pages.
// Where an array first gets huge pages its content is copied once, since its pages so far are small ones.
bool GrowArray::grow_mapped(size_t bytes) {
  const bool huge = bytes >= kHugeMin;
  const size_t unit = huge ? kHugePage : kPage;
  const size_t size = round_up(bytes, unit);
  std::byte* place = reserve_aligned(size, unit);
  if (place == nullptr) return false;
  if (mapped_ && kMovesPages && huge == (capacity_ >= kHugeMin)) {
    if (mremap(data_, capacity_, size, MREMAP_MAYMOVE | MREMAP_FIXED, place) != MAP_FAILED) {
      data_ = place;
      capacity_ = size;
      return true;
    }
    // The kernel may have unmapped the place before it failed, and another thread may have it by now.
    return false;
  } else if (mprotect(place, size, PROT_READ | PROT_WRITE) == 0) {
    if (huge) madvise(place, size, MADV_HUGEPAGE);  // a wish: without huge pages everything works, slower
    move_to(place, size, true);
    return true;
  }
  munmap(place, size);
  return false;
}

void GrowArray::move_to(std::byte* place, size_t size, bool mapped) {
  if (capacity_ > 0) std::memcpy(place, data_, capacity_);
  reset();
  data_ = place;
  capacity_ = size;
  mapped_ = mapped;
}

}  // namespace shoal
