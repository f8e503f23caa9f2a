// The arena over shared segments. Who owns what: the arena owns its regions, a block owns a share of its
// region; nothing points back. A segment is unmapped with its last block once the arena let go of it.
#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/grow_array.h"
#include "net/free_ranges.h"
#include "net/shm.h"

namespace shoal {
namespace {

constexpr size_t page_bytes = 4096;  // what blocks are aligned to, not what the kernel's pages are
constexpr size_t line_bytes = 64;
constexpr size_t address_space_bytes = size_t{1} << 47;  // keeps sums of sizes from overflowing

// A segment and what is free in it. Adds its size to the arena's count for as long as it is mapped.
class Region {
 public:
  Region(std::shared_ptr<Segment> segment, std::shared_ptr<std::atomic<size_t>> mapped)
      : segment_(std::move(segment)), mapped_(std::move(mapped)), free_(segment_->bytes().size()) {
    *mapped_ += segment_->bytes().size();
  }
  ~Region() { *mapped_ -= segment_->bytes().size(); }

  const std::shared_ptr<Segment>& segment() const { return segment_; }

  std::optional<size_t> take(size_t bytes) {
    const std::lock_guard lock(mutex_);
    return bytes < page_bytes ? free_.take_highest(bytes, line_bytes) : free_.take_lowest(bytes, page_bytes);
  }
  void give(size_t offset, size_t bytes) {
    const std::lock_guard lock(mutex_);
    free_.give(offset, bytes);
  }
  bool all_free() const {
    const std::lock_guard lock(mutex_);
    return free_.all_free();
  }

 private:
  const std::shared_ptr<Segment> segment_;
  const std::shared_ptr<std::atomic<size_t>> mapped_;
  mutable std::mutex mutex_;
  FreeRanges free_;  // guarded by mutex_
};

class SharedBlock final : public Block {
 public:
  SharedBlock(std::shared_ptr<Region> region, size_t offset, size_t bytes)
      : Block(region->segment(), offset, bytes), region_(std::move(region)) {}
  ~SharedBlock() override { region_->give(offset(), bytes().size()); }

 private:
  const std::shared_ptr<Region> region_;
};

class SharedArena final : public Arena {
 public:
  SharedArena(size_t segment_bytes_min, size_t bytes_max)
      : bytes_max_(std::min(bytes_max, address_space_bytes)),
        segment_bytes_min_(std::min(segment_bytes_min, bytes_max_)) {}

  std::shared_ptr<Block> allocate(size_t bytes) override {
    if (bytes > bytes_max_) return nullptr;
    bytes = std::max<size_t>(bytes, 1);
    bytes = round_up(bytes, bytes < page_bytes ? line_bytes : page_bytes);
    const std::lock_guard lock(mutex_);
    for (const auto& region : regions_)
      if (const auto offset = region->take(bytes))
        return std::make_shared<SharedBlock>(region, *offset, bytes);
    const auto region = grow(bytes);
    if (region == nullptr) return nullptr;
    return std::make_shared<SharedBlock>(region, *region->take(bytes), bytes);
  }

  size_t bytes_mapped() const override { return *mapped_; }

 private:
  // A new region with room for `bytes`, or null at the limit. The segment is made under the lock, so
  // that threads in need of one do not each make their own; it takes some 20 us, and is rare.
  std::shared_ptr<Region> grow(size_t bytes) {
    const size_t wanted = round_up(std::max(bytes, segment_bytes_min_), page_bytes);
    if (*mapped_ + wanted > bytes_max_) drop_free_regions(bytes);
    // Near the limit, a smaller segment than usual is better than none.
    const size_t left = bytes_max_ - std::min<size_t>(bytes_max_, *mapped_);
    const size_t size = std::min(wanted, left / page_bytes * page_bytes);
    if (size < bytes || next_id_ == 0) return nullptr;
    auto segment = Segment::create(next_id_, size);
    if (!segment.ok()) return nullptr;
    ++next_id_;
    return regions_.emplace_back(std::make_shared<Region>(*segment, mapped_));
  }

  // Unmaps the regions that no block lies in, if that makes room for a segment of `bytes`: many small
  // segments, all free, must not refuse a large request for ever.
  void drop_free_regions(size_t bytes) {
    size_t remaining = *mapped_;
    for (const auto& region : regions_)
      remaining -= region->all_free() ? region->segment()->bytes().size() : 0;
    if (remaining + bytes <= bytes_max_)
      std::erase_if(regions_, [](const auto& region) { return region->all_free(); });
  }

  const size_t bytes_max_;
  const size_t segment_bytes_min_;
  // Shared with the regions, which may outlive the arena.
  const std::shared_ptr<std::atomic<size_t>> mapped_ = std::make_shared<std::atomic<size_t>>(0);
  std::mutex mutex_;
  std::vector<std::shared_ptr<Region>> regions_;  // guarded by mutex_; the oldest first
  uint32_t next_id_ = 1;                          // guarded by mutex_
};

}  // namespace

std::shared_ptr<Arena> make_shared_arena(size_t segment_bytes_min, size_t bytes_max) {
  return std::make_shared<SharedArena>(segment_bytes_min, bytes_max);
}

}  // namespace shoal
