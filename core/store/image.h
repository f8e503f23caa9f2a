// A shard as it was at one moment, read page by page while pushes go on: the first write to a row that was
// not read yet keeps a copy of what the row was. Checkpoints, new replicas and moved shards are made of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace shoal {

struct RowMeta {
  uint64_t version = 0;  // of the last write
  uint32_t frequency = 0;
  uint32_t last_step = 0;
};
static_assert(sizeof(RowMeta) == 16);

// Rows of a table, or pieces of a tensor, with all that belongs to them.
struct ImagePage {
  uint32_t table = 0;
  std::vector<int64_t> keys = {};
  std::vector<RowMeta> metas = {};
  std::vector<float> rows = {};  // value and optimizer state of each, one after the other
};

}  // namespace shoal
