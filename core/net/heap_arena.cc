// The arena over plain memory. Freed blocks go to a shelf, by size class, and come from there again with
// their pages in place; when the shelf is full, the class that was asked for longest ago makes room.
#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cassert>
#include <mutex>
#include <utility>
#include <vector>

#include "base/grow_array.h"
#include "net/shm.h"

namespace shoal {
namespace {

constexpr size_t line_bytes = 64;
constexpr size_t block_bytes_max = size_t{1} << 46;

// Classes: multiples of 64 up to 512, then eight steps to each doubling, so at most an eighth is unused.
constexpr int steps_log2 = 3;
constexpr size_t class_count = 320;

struct SizeClass {
  size_t index;
  size_t bytes;
};

constexpr SizeClass size_class(size_t bytes) {
  const size_t lines = (std::max<size_t>(bytes, 1) + line_bytes - 1) / line_bytes;
  if (lines <= size_t{1} << steps_log2) return {lines - 1, lines * line_bytes};
  const int shift = static_cast<int>(std::bit_width(lines - 1)) - 1 - steps_log2;
  const size_t step = ((lines - 1) >> shift) + 1;  // 9..16 eighths of the power of two below
  const size_t index = (static_cast<size_t>(shift) << steps_log2) + step - 1;
  return {index, (step << shift) * line_bytes};
}
static_assert(size_class(512).index == 7 && size_class(513).index == 8 && size_class(513).bytes == 576);
static_assert(size_class(1024).index == 15 && size_class(1025).index == 16 && size_class(1025).bytes == 1152);
static_assert(size_class(block_bytes_max).index < class_count);

// The free memory that is kept. Outlives the arena while blocks do, but keeps nothing from then on.
class Shelf {
 public:
  explicit Shelf(size_t bytes_kept_max) : bytes_kept_max_(bytes_kept_max) {}

  // Empty when memory is exhausted.
  GrowArray take(SizeClass wanted) {
    {
      const std::lock_guard lock(mutex_);
      Stack& stack = stacks_[wanted.index];
      stack.last_used = ++uses_;
      if (!stack.memory.empty()) return pop(stack, wanted.bytes);
    }
    GrowArray fresh;
    if (fresh.reserve(wanted.bytes)) bytes_mapped_ += wanted.bytes;
    return fresh;
  }

  void give(GrowArray memory, SizeClass size) {
    std::vector<GrowArray> surplus;  // freed after the lock is released
    const std::lock_guard lock(mutex_);
    if (size.bytes > bytes_kept_max_) {
      bytes_mapped_ -= size.bytes;
      surplus.push_back(std::move(memory));
      return;
    }
    Stack& stack = stacks_[size.index];
    stack.last_used = ++uses_;
    while (bytes_kept_ + size.bytes > bytes_kept_max_) surplus.push_back(evict());
    bytes_kept_ += size.bytes;
    stack.memory.push_back(std::move(memory));
    stack.bytes = size.bytes;
  }

  void close() {
    std::vector<GrowArray> surplus;
    const std::lock_guard lock(mutex_);
    bytes_kept_max_ = 0;
    while (bytes_kept_ > 0) surplus.push_back(evict());
  }

  size_t bytes_mapped() const { return bytes_mapped_; }

 private:
  struct Stack {
    std::vector<GrowArray> memory;  // the warmest last
    size_t bytes = 0;               // of each
    uint64_t last_used = 0;
  };

  GrowArray pop(Stack& stack, size_t bytes) {
    GrowArray memory = std::move(stack.memory.back());
    stack.memory.pop_back();
    bytes_kept_ -= bytes;
    return memory;
  }

  GrowArray evict() {
    Stack* oldest = nullptr;
    for (Stack& stack : stacks_)
      if (!stack.memory.empty() && (oldest == nullptr || stack.last_used < oldest->last_used))
        oldest = &stack;
    assert(oldest != nullptr);  // something is kept, or the shelf could not be full
    bytes_mapped_ -= oldest->bytes;
    return pop(*oldest, oldest->bytes);
  }

  std::atomic<size_t> bytes_mapped_{0};
  std::mutex mutex_;
  // Guarded by mutex_:
  size_t bytes_kept_max_;
  std::array<Stack, class_count> stacks_;
  size_t bytes_kept_ = 0;
  uint64_t uses_ = 0;
};

class HeapBlock final : public Block {
 public:
  HeapBlock(std::shared_ptr<Shelf> shelf, GrowArray memory, SizeClass size)
      : Block({memory.data(), size.bytes}),
        shelf_(std::move(shelf)),
        memory_(std::move(memory)),
        size_(size) {}
  ~HeapBlock() override { shelf_->give(std::move(memory_), size_); }

 private:
  const std::shared_ptr<Shelf> shelf_;
  GrowArray memory_;
  const SizeClass size_;
};

class HeapArena final : public Arena {
 public:
  explicit HeapArena(size_t bytes_kept) : shelf_(std::make_shared<Shelf>(bytes_kept)) {}
  ~HeapArena() override { shelf_->close(); }

  std::shared_ptr<Block> allocate(size_t bytes) override {
    if (bytes > block_bytes_max) return nullptr;
    const SizeClass size = size_class(bytes);
    GrowArray memory = shelf_->take(size);
    if (memory.capacity() == 0) return nullptr;
    return std::make_shared<HeapBlock>(shelf_, std::move(memory), size);
  }

  size_t bytes_mapped() const override { return shelf_->bytes_mapped(); }

 private:
  const std::shared_ptr<Shelf> shelf_;
};

}  // namespace

std::shared_ptr<Arena> make_heap_arena(size_t bytes_kept) { return std::make_shared<HeapArena>(bytes_kept); }

}  // namespace shoal
