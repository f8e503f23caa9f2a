// What workers ask of the sync shard and what it answers, as values and as bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/status.h"
#include "store/commit.h"

namespace shoal {

enum class SyncVerb : uint32_t {
  open = 1,
  advance = 2,      // "I finished `step`; may I go on?"
  state = 3,        // who is where
  ledger_open = 4,  // the pass `epoch` has `count` batches; `step` says how they are cut
  lease = 5,        // up to `count` units of it; with kOverdue in `step` also of what others hold
  pass_end = 6,     // "I have nothing left to do in this pass", nor since it has grown `step` times
  leave = 7,        // for good; of a newer life of the same client: the older one is evicted (kAway)
  report = 8,       // what became of the units of a pass
  resume = 9,   // the first pass from `epoch` on that is not over; what of it is done of a rank's own units
  resize = 10,  // the job goes on with the workers of `config`
  keep = 11,    // which of `units`, of the pass `epoch`, are still leased to me? Nobody takes those over
};

// Which contributions make an update.
enum class Take : uint32_t {
  each = 0,   // every push as it comes: nothing is staged
  round = 1,  // those of one step, once enough of the workers have finished it
  count = 2,  // the next so many, of whatever step
};

struct SyncConfig {
  uint32_t workers = 0;
  Take take = Take::each;
  double quorum = 1.0;  // round: the part of the workers that closes it
  uint32_t count = 1;   // count: contributions in an update
  int32_t slack = -1;   // each, count: steps that a worker may be ahead of the slowest; < 0: any

  bool operator==(const SyncConfig&) const = default;
};

// How a pass is handed out, as flags in `step` of ledger_open.
inline constexpr uint64_t kSplit = 1;         // a batch is cut into as many units as there are workers
inline constexpr uint64_t kStatic = 2;        // rank r of n has every n-th unit from r on
inline constexpr uint64_t kSeveralSteps = 4;  // a batch may be stepped with more than once

inline constexpr uint64_t kOverdue = 1;  // in `step` of lease
inline constexpr uint64_t kBack = 1;     // in `step` of open: whoever asks need not know how many there are
inline constexpr uint64_t kAway = 1;     // in `step` of leave: nobody is known to replace it

// A unit of data: part p of batch b of n workers is b * n + p.
struct UnitName {
  uint64_t epoch;
  uint64_t unit;
};

struct SyncAsk {
  SyncVerb verb = SyncVerb::state;
  uint32_t rank = 0;
  uint64_t step = 0;
  uint64_t epoch = 0;
  uint64_t count = 0;
  uint64_t number = 0;   // grows with each question of a client; the same when it is sent again
  uint64_t applied = 0;  // commits up to here are done on every server
  SyncConfig config;
  float weight = 0.0f;  // round: samples; count: what the gradient is multiplied by; 0: abstains
  float lr = 0.0f;
  float clip = 0.0f;
  uint32_t reserved = 0;
};
static_assert(sizeof(SyncAsk) == 88);

struct SyncRequest : SyncAsk {
  std::vector<UnitName> units;  // advance: done in this step; keep: asked about
  // Whose it is: not part of the message but of the connection it came by.
  uint64_t client = 0;
  uint32_t incarnation = 0;
};

struct SyncReply {
  Status status;
  uint64_t step = 0;    // to work on next
  uint64_t closed = 0;  // seq of the last commit
  bool dropped = false;
  bool again = false;  // pass_end: units came back, lease again
  std::vector<uint64_t> numbers = {};
  std::vector<Commit> commits = {};  // that may not be done everywhere yet
};

std::vector<std::byte> encode_sync(const SyncRequest& request);
std::optional<SyncRequest> decode_sync(std::span<const std::byte> bytes);
std::vector<std::byte> encode_sync_reply(const SyncReply& reply);
std::optional<SyncReply> decode_sync_reply(std::span<const std::byte> bytes);

}  // namespace shoal
