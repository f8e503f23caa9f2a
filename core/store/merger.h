// Summing the rows of duplicate keys: what a client does to a push before it leaves, and a shard to the
// contributions of a commit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "store/push_part.h"

namespace shoal {

// Sums the rows of equal keys in order of occurrence, so that every replay gives the same bits. Keeps
// its scratch table warm between calls.
class Merger {
 public:
  // Writes each distinct key once (in order of first occurrence) and the sum of its rows; returns how
  // many. Row i of the group is `rows + positions[i] * dim`. Where values are assigned, the last
  // occurrence counts alone.
  uint32_t merge(PushMode mode, std::span<const int64_t> keys, const uint32_t* positions, const float* rows,
                 uint32_t dim, int64_t* keys_out, float* sums_out);
  // The same of rows that lie anywhere, each times its weight.
  struct WeightedRow {
    const float* row;
    float weight;
  };
  uint32_t merge(std::span<const int64_t> keys, const WeightedRow* rows, uint32_t dim, int64_t* keys_out,
                 float* sums_out);
  // Distinct keys without rows, for pulls: heads[n] is the last place (counted from `base`) of distinct key
  // n, and before[i] the one before place base + i, or kNone.
  static constexpr uint32_t kNone = 0xffffffff;
  uint32_t distinct(std::span<const int64_t> keys, uint32_t base, int64_t* keys_out, uint32_t* heads,
                    uint32_t* before);

 private:
  struct Cell {
    uint32_t stamp;
    uint32_t number;  // of the distinct key
  };
  // Calls first(number, i) for the first occurrence of a key and again(number, i) for the others.
  template <typename First, typename Again>
  uint32_t run(std::span<const int64_t> keys, int64_t* keys_out, First first, Again again);

  std::vector<Cell> cells_;
  uint32_t stamp_ = 0;
};

}  // namespace shoal
