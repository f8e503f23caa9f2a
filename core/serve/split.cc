#include "serve/split.h"

#include <algorithm>

#include "base/hash.h"
#include "store/store.h"

namespace shoal {
namespace {

constexpr size_t kScratchKept = 1 << 20;  // keys

}  // namespace

SplitKeys split_keys(const TableSpec& spec, std::span<const int64_t> keys, uint32_t shards, int64_t* keys_out,
                     uint32_t* positions_out) {
  SplitKeys split{.keys = keys_out, .positions = positions_out, .begin = std::vector<uint32_t>(shards + 1)};
  // Kept, not computed again: the caller's array may change under us, and then counts would be wrong.
  static thread_local std::vector<uint16_t> shard;
  if (shard.size() > std::max(keys.size(), kScratchKept)) shard = {};  // gives the memory back
  if (shard.size() < keys.size()) shard.resize(keys.size());
  if (!spec.dense && spec.range_low >= spec.range_high) {
    for (size_t i = 0; i < keys.size(); ++i) {
      shard[i] = static_cast<uint16_t>(shard_of_hash(mix64(static_cast<uint64_t>(keys[i])), shards));
    }
  } else {
    for (size_t i = 0; i < keys.size(); ++i) {
      shard[i] = static_cast<uint16_t>(shard_of_key(spec, keys[i], shards));
    }
  }
  for (size_t i = 0; i < keys.size(); ++i) ++split.begin[shard[i] + 1u];
  for (uint32_t s = 0; s < shards; ++s) {
    split.count_max = std::max<size_t>(split.count_max, split.begin[s + 1]);
    split.begin[s + 1] += split.begin[s];
  }
  std::vector<uint32_t> next(split.begin.begin(), split.begin.end() - 1);
  for (size_t i = 0; i < keys.size(); ++i) {
    const uint32_t at = next[shard[i]]++;
    keys_out[at] = keys[i];
    positions_out[at] = static_cast<uint32_t>(i);
  }
  return split;
}

std::vector<size_t> shard_bytes(const SplitKeys& split, size_t row_bytes) {
  std::vector<size_t> bytes(split.begin.size() - 1);
  for (uint32_t s = 0; s < bytes.size(); ++s) bytes[s] = split.count(s) * row_bytes;
  return bytes;
}

}  // namespace shoal
