#include "net/free_ranges.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <iterator>

namespace shoal {

FreeRanges::FreeRanges(size_t bytes) : bytes_(bytes), ranges_{{0, bytes}}, largest_max_(bytes) {
  assert(bytes > 0);
}

std::optional<size_t> FreeRanges::take(size_t bytes, size_t alignment, bool lowest) {
  assert(bytes > 0 && std::has_single_bit(alignment));
  if (bytes > largest_max_) return std::nullopt;
  size_t largest = 0;
  for (size_t n = 0; n < ranges_.size(); ++n) {
    const size_t i = lowest ? n : ranges_.size() - 1 - n;
    const Range range = ranges_[i];
    if (range.bytes() >= bytes) {
      const size_t begin = (lowest ? range.begin + alignment - 1 : range.end - bytes) & ~(alignment - 1);
      if (begin >= range.begin && begin + bytes <= range.end) {
        cut(i, begin, begin + bytes);
        return begin;
      }
    }
    largest = std::max(largest, range.bytes());
  }
  largest_max_ = largest;
  return std::nullopt;
}

void FreeRanges::cut(size_t index, size_t begin, size_t end) {
  const Range range = ranges_[index];
  assert(range.begin <= begin && begin < end && end <= range.end);
  const auto at = ranges_.begin() + static_cast<std::ptrdiff_t>(index);
  if (range.begin == begin && range.end == end) {
    ranges_.erase(at);
  } else if (range.begin == begin) {
    at->begin = end;
  } else {
    at->end = begin;
    if (end < range.end) ranges_.insert(at + 1, Range{end, range.end});
  }
}

void FreeRanges::give(size_t offset, size_t bytes) {
  Range range{offset, offset + bytes};
  assert(bytes > 0 && range.end <= bytes_);
  auto after = std::lower_bound(ranges_.begin(), ranges_.end(), offset,
                                [](const Range& r, size_t begin) { return r.begin < begin; });
  assert(after == ranges_.end() || range.end <= after->begin);
  assert(after == ranges_.begin() || std::prev(after)->end <= offset);
  const bool joins_before = after != ranges_.begin() && std::prev(after)->end == offset;
  const bool joins_after = after != ranges_.end() && after->begin == range.end;
  if (joins_before && joins_after) {
    range = {std::prev(after)->begin, after->end};
    *std::prev(after) = range;
    ranges_.erase(after);
  } else if (joins_before) {
    std::prev(after)->end = range.end;
    range = *std::prev(after);
  } else if (joins_after) {
    after->begin = offset;
    range = *after;
  } else {
    ranges_.insert(after, range);
  }
  largest_max_ = std::max(largest_max_, range.bytes());
}

}  // namespace shoal
