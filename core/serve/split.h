// Cutting a batch of keys by shard: what a client does to a request before it leaves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "store/merger.h"
#include "store/table_spec.h"

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

// What each shard gets, at so many bytes a row.
std::vector<size_t> shard_bytes(const SplitKeys& split, size_t row_bytes);

}  // namespace shoal
