// Which parts of a segment are free: ranges in order of offset, neighbours always merged. Not
// thread-safe; knows nothing of memory.
//
// Small pieces are taken from the high end and large ones from the low end, so a small piece that lives
// long does not split the room the large ones take turns in. Both ends prefer the same places over and
// over, which are the ones whose pages are already there.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

namespace shoal {

class FreeRanges {
 public:
  explicit FreeRanges(size_t bytes);  // all of [0, bytes) is free

  // The lowest (highest) place for `bytes` at a multiple of `alignment`, a power of two; taken from then on.
  // Cost: the ranges passed over on the way, 2 ns each; one comparison when no range is large enough.
  std::optional<size_t> take_lowest(size_t bytes, size_t alignment) { return take(bytes, alignment, true); }
  std::optional<size_t> take_highest(size_t bytes, size_t alignment) { return take(bytes, alignment, false); }

  // Gives back exactly what one take returned.
  void give(size_t offset, size_t bytes);

  bool all_free() const { return ranges_.size() == 1 && ranges_[0].bytes() == bytes_; }

 private:
  struct Range {
    size_t begin;
    size_t end;
    size_t bytes() const { return end - begin; }
  };

  std::optional<size_t> take(size_t bytes, size_t alignment, bool lowest);
  // Cuts [begin, end) out of the range at `index`.
  void cut(size_t index, size_t begin, size_t end);

  const size_t bytes_;
  std::vector<Range> ranges_;
  size_t largest_max_;  // no range is larger than this; exact only after a search in vain
};

}  // namespace shoal
