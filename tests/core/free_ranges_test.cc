#include "net/free_ranges.h"

#include <algorithm>
#include <random>
#include <vector>

#include "check.h"

using namespace shoal;

TEST(large_pieces_come_from_below_and_small_from_above) {
  FreeRanges ranges(1 << 20);
  CHECK_EQ(*ranges.take_lowest(8192, 4096), 0);
  CHECK_EQ(*ranges.take_lowest(4096, 4096), 8192);
  CHECK_EQ(*ranges.take_highest(64, 64), (1 << 20) - 64);
  CHECK_EQ(*ranges.take_highest(128, 64), (1 << 20) - 192);
}

TEST(neighbours_merge_on_either_side) {
  FreeRanges ranges(4096);
  for (size_t i = 0; i < 4; ++i) {
    CHECK_EQ(*ranges.take_lowest(1024, 64), i * 1024);
  }
  CHECK(!ranges.take_lowest(64, 64).has_value());
  for (const size_t i : {3, 1, 2, 0}) {
    CHECK(!ranges.all_free());
    ranges.give(i * 1024, 1024);
  }
  CHECK(ranges.all_free());
  CHECK_EQ(*ranges.take_lowest(4096, 4096), 0);
}

TEST(a_search_in_vain_does_not_hide_what_is_given_back_later) {
  FreeRanges ranges(4096);
  const size_t all = *ranges.take_lowest(4096, 64);
  CHECK(!ranges.take_highest(64, 64).has_value());
  ranges.give(all, 4096);
  CHECK_EQ(*ranges.take_highest(4096, 64), 0);
}

TEST(alignment_is_kept_and_leaves_the_rest_usable) {
  FreeRanges ranges(3 * 4096);
  CHECK_EQ(*ranges.take_lowest(64, 64), 0);
  CHECK_EQ(*ranges.take_lowest(4096, 4096), 4096);
  CHECK_EQ(*ranges.take_lowest(64, 64), 64);
  CHECK(!ranges.take_lowest(8192, 4096).has_value());
}

TEST(random_pieces_never_overlap_and_all_come_back) {
  struct Piece {
    size_t offset, bytes;
  };
  constexpr size_t unit = 64;
  std::mt19937 random(3);
  FreeRanges ranges(1000 * unit);
  std::vector<char> used(1000);
  std::vector<Piece> pieces;
  for (int turn = 0; turn < 20'000; ++turn) {
    if (random() % 2 == 0 && !pieces.empty()) {
      std::swap(pieces[random() % pieces.size()], pieces.back());
      const auto [offset, bytes] = pieces.back();
      pieces.pop_back();
      ranges.give(offset, bytes);
      std::fill_n(used.begin() + static_cast<std::ptrdiff_t>(offset / unit), bytes / unit, char{0});
      continue;
    }
    const size_t bytes = (1 + random() % 30) * unit;
    const size_t alignment = unit << (random() % 3);
    const auto offset =
        random() % 2 == 0 ? ranges.take_lowest(bytes, alignment) : ranges.take_highest(bytes, alignment);
    if (offset.has_value()) {
      CHECK_EQ(*offset % alignment, 0);
      const auto begin = used.begin() + static_cast<std::ptrdiff_t>(*offset / unit);
      CHECK_EQ(std::count(begin, begin + static_cast<std::ptrdiff_t>(bytes / unit), 0), bytes / unit);
      std::fill_n(begin, bytes / unit, char{1});
      pieces.push_back({*offset, bytes});
    }
  }
  for (const auto& [offset, bytes] : pieces) {
    ranges.give(offset, bytes);
  }
  CHECK(ranges.all_free());
}
