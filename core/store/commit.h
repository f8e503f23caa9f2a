// What closes a round: which staged contributions make an update, in which order and with what weight.
// The sync shard makes commits, one after the other; workers carry them to every shard.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "wire/pack.h"

namespace shoal {

inline constexpr float kDropped = -1.0f;

// The pushes that one worker staged for one of its steps. They are named with the client that staged them:
// what an earlier life of the same rank left behind is never meant.
struct CommitEntry {
  uint64_t client = 0;
  uint64_t step = 0;
  uint32_t incarnation = 0;
  uint32_t rank = 0;
  float weight = 0.0f;  // kDropped: forgotten, not summed
  uint32_t reserved = 0;
};
static_assert(sizeof(CommitEntry) == 32);

struct Commit {
  uint64_t seq = 0;    // 1, 2, ...
  float lr = NAN;      // NaN: each table's as it was staged
  float clip = 0.0f;   // largest norm of the whole sum; 0: any
  float scale = 1.0f;  // what the sum is multiplied by: filled in by who carries it, from `clip`
  std::vector<CommitEntry> entries = {};  // by rank, then step
};

void encode_commit(const Commit& commit, std::vector<std::byte>& out);
// Takes a commit from the front of `bytes`; false where there is none.
bool decode_commit(std::span<const std::byte>& bytes, Commit& commit);

}  // namespace shoal
