// The arena over plain memory. Freed blocks go to a shelf, by size class, and come from there again with
// their pages in place; when the shelf is full, the class that was asked for longest ago makes room.
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cassert>
#include <cstdlib>
#include <mutex>
#include <utility>
#include <vector>

#include "net/shm.h"

namespace shoal {
namespace {

constexpr size_t line_bytes = 64;
constexpr size_t map_bytes_min = size_t{1} << 20;  // from here on from the kernel, not from malloc
constexpr size_t huge_page_bytes = size_t{2} << 20;
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

// Aligned to 2 MiB, so that the kernel can use huge pages from the first byte on.
std::byte* map_aligned(size_t bytes) {
  assert(bytes % (map_bytes_min / 8) == 0);  // classes this large are whole pages of any size
  const size_t room = bytes + huge_page_bytes;
  void* mapped = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  auto* const begin = static_cast<std::byte*>(mapped);
  const size_t head =
      (huge_page_bytes - reinterpret_cast<uintptr_t>(begin) % huge_page_bytes) % huge_page_bytes;
  if (head > 0) {
    munmap(begin, head);
  }
  munmap(begin + head + bytes, room - head - bytes);
  madvise(begin + head, bytes, MADV_HUGEPAGE);  // a wish; small pages work too
  return begin + head;
}

// Owns one piece of memory.
class Memory {
 public:
  Memory() = default;
  static Memory allocate(size_t bytes) {
    Memory memory;
    memory.base_ = bytes >= map_bytes_min ? map_aligned(bytes)
                                          : static_cast<std::byte*>(std::aligned_alloc(line_bytes, bytes));
    memory.bytes_ = bytes;
    return memory;
  }
  Memory(Memory&& other) noexcept : base_(std::exchange(other.base_, nullptr)), bytes_(other.bytes_) {}
  Memory& operator=(Memory&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Memory() {
    if (base_ != nullptr && bytes_ >= map_bytes_min) {
      munmap(base_, bytes_);
    } else {
      std::free(base_);
    }
  }

  bool valid() const { return base_ != nullptr; }
  std::span<std::byte> bytes() const { return {base_, bytes_}; }

 private:
  std::byte* base_ = nullptr;
  size_t bytes_ = 0;
};

// The free memory that is kept. Outlives the arena while blocks do, but keeps nothing from then on.
class Shelf {
 public:
  explicit Shelf(size_t bytes_kept_max) : bytes_kept_max_(bytes_kept_max) {}

  struct Taken {
    Memory memory;
    uint64_t generation;
  };

  Taken take(SizeClass wanted) {
    std::unique_lock lock(mutex_);
    Stack& stack = stacks_[wanted.index];
    stack.last_used = ++uses_;
    const uint64_t generation = generation_;
    if (!stack.memory.empty()) {
      Taken taken{std::move(stack.memory.back()), generation};
      stack.memory.pop_back();
      bytes_kept_ -= wanted.bytes;
      return taken;
    }
    lock.unlock();
    Taken taken{Memory::allocate(wanted.bytes), generation};
    bytes_mapped_ += taken.memory.valid() ? wanted.bytes : 0;
    return taken;
  }

  void give(Memory memory, uint64_t generation) {
    std::vector<Memory> surplus;  // freed after the lock is released
    const std::lock_guard lock(mutex_);
    const size_t bytes = memory.bytes().size();
    if (generation != generation_ || bytes > bytes_kept_max_) {
      discard(std::move(memory), surplus);
      return;
    }
    Stack& stack = stacks_[size_class(bytes).index];
    stack.last_used = ++uses_;
    while (bytes_kept_ + bytes > bytes_kept_max_) {
      evict(surplus);
    }
    bytes_kept_ += bytes;
    stack.memory.push_back(std::move(memory));
  }

  // What is out now will not be kept when it comes back.
  void retire() {
    std::vector<Memory> surplus;
    const std::lock_guard lock(mutex_);
    ++generation_;
    for (Stack& stack : stacks_) {
      for (Memory& memory : stack.memory) {
        discard(std::move(memory), surplus);
      }
      stack.memory.clear();
    }
    bytes_kept_ = 0;
  }

  size_t bytes_mapped() const { return bytes_mapped_; }

 private:
  struct Stack {
    std::vector<Memory> memory;  // the warmest last
    uint64_t last_used = 0;
  };

  void discard(Memory memory, std::vector<Memory>& surplus) {
    bytes_mapped_ -= memory.bytes().size();
    surplus.push_back(std::move(memory));
  }

  void evict(std::vector<Memory>& surplus) {
    Stack* oldest = nullptr;
    for (Stack& stack : stacks_) {
      if (!stack.memory.empty() && (oldest == nullptr || stack.last_used < oldest->last_used)) {
        oldest = &stack;
      }
    }
    assert(oldest != nullptr);  // something is kept, or the shelf could not be full
    bytes_kept_ -= oldest->memory.back().bytes().size();
    discard(std::move(oldest->memory.back()), surplus);
    oldest->memory.pop_back();
  }

  const size_t bytes_kept_max_;
  std::atomic<size_t> bytes_mapped_{0};
  std::mutex mutex_;
  // Guarded by mutex_:
  std::array<Stack, class_count> stacks_;
  size_t bytes_kept_ = 0;
  uint64_t uses_ = 0;
  uint64_t generation_ = 0;
};

class HeapBlock final : public Block {
 public:
  HeapBlock(std::shared_ptr<Shelf> shelf, Shelf::Taken taken)
      : shelf_(std::move(shelf)), memory_(std::move(taken.memory)), generation_(taken.generation) {}
  ~HeapBlock() override { shelf_->give(std::move(memory_), generation_); }
  HeapBlock(const HeapBlock&) = delete;
  HeapBlock& operator=(const HeapBlock&) = delete;

  std::span<std::byte> bytes() const override { return memory_.bytes(); }
  const Segment* segment() const override { return nullptr; }
  size_t offset() const override { return 0; }

 private:
  const std::shared_ptr<Shelf> shelf_;
  Memory memory_;
  const uint64_t generation_;
};

class HeapArena final : public Arena {
 public:
  explicit HeapArena(size_t bytes_kept) : shelf_(std::make_shared<Shelf>(bytes_kept)) {}
  ~HeapArena() override { shelf_->retire(); }
  HeapArena(const HeapArena&) = delete;
  HeapArena& operator=(const HeapArena&) = delete;

  std::shared_ptr<Block> allocate(size_t bytes) override {
    if (bytes > block_bytes_max) return nullptr;
    Shelf::Taken taken = shelf_->take(size_class(bytes));
    if (!taken.memory.valid()) return nullptr;
    return std::make_shared<HeapBlock>(shelf_, std::move(taken));
  }

  void retire() override { shelf_->retire(); }
  size_t bytes_mapped() const override { return shelf_->bytes_mapped(); }

 private:
  const std::shared_ptr<Shelf> shelf_;
};

}  // namespace

std::shared_ptr<Arena> make_heap_arena(size_t bytes_kept) { return std::make_shared<HeapArena>(bytes_kept); }

}  // namespace shoal
