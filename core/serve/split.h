// Cutting a batch of keys by shard, and merging the gradients of duplicate keys: what a client does to a
// request before it leaves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "store/shard.h"

namespace shoal {

// Keys grouped by shard. Group s is [begin[s], begin[s + 1]); within a group keys keep the order of
// occurrence, and `positions` tells where each stood in the batch.
struct SplitKeys {
  int64_t* keys = nullptr;
  uint32_t* positions = nullptr;
  std::vector<uint32_t> begin;  // shards + 1
  size_t count_max = 0;         // keys of the largest group

  uint32_t count(uint32_t shard) const { return begin[shard + 1] - begin[shard]; }
  std::span<const int64_t> group(uint32_t shard) const { return {keys + begin[shard], count(shard)}; }
};

// `keys_out` and `positions_out` have room for all keys (they may lie in shared memory).
SplitKeys split_keys(const TableSpec& spec, std::span<const int64_t> keys, uint32_t shards, int64_t* keys_out,
                     uint32_t* positions_out);

// Sums the rows of equal keys in order of occurrence, so that every replay gives the same bits. Keeps
// its scratch table warm between calls.
class Merger {
 public:
  // Writes each distinct key once (in order of first occurrence) and the sum of its rows; returns how
  // many. Row i of the group is `rows + positions[i] * dim`. Where values are assigned, the last
  // occurrence counts alone.
  uint32_t merge(PushMode mode, std::span<const int64_t> keys, const uint32_t* positions, const float* rows,
                 uint32_t dim, int64_t* keys_out, float* sums_out);
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
