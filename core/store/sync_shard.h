// The clocks, rounds and ledger of one job: a state machine without I/O and without a clock of its own. The
// server that owns shard 0 runs it, the embedded store has it beside its shards, tests feed it by hand.
//
// A worker's clock is the number of its steps that are finished. A request is answered at once or parked
// until something that another worker does makes it ready; every event gives all that is then ready.
// Invariants:
//   - A step is finished once: asking again changes nothing and is answered from the state.
//   - A contribution is in one commit at most, or is dropped; its units are done or given back with it.
//   - Commits are numbered without gaps, and handed out until some worker says that they are done everywhere.
//   - A rank has one life at a time. Who evicts an earlier one speaks for a newer one, so that a late word
//     of any of them changes nothing.
//   - A pass that nobody leases takes in new workers where a round closes that all others are in, and which
//     they wait for at its end: nobody has begun anything that is then cut anew. `growths` is in every answer
//     that lets somebody go on, so whoever draws a unit after it knows of it.
//   - One question of a rank is parked at most, with the tokens of all that have asked it; a newer one takes
//     its place, and what arrives after a newer one changes nothing.
// Not thread-safe.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/mutants.h"
#include "store/sync_message.h"
#include "store/work_ledger.h"

namespace shoal {

inline constexpr uint32_t kWorkersMax = 4096;

class SyncShard {
 public:
  struct Answer {
    uint64_t token;
    SyncReply reply;
  };

  // `token` names the request until it is answered; `now` is in seconds and only grows.
  std::vector<Answer> handle(const SyncRequest& request, uint64_t token, double now);

  // sync_image.cc. A checkpoint's is gone on with by a job of any size and word; a `live` one by who is
  // there.
  std::vector<std::byte> encode(bool live = false) const;
  std::vector<uint64_t> clocks() const;        // by rank
  bool decode(std::span<const std::byte> in);  // false: not a sync shard; nothing has changed

  // What a worker is doing, in the numbers of `state`: (clock, phase, milliseconds in that phase) per rank
  // behind the count of dropped contributions. Gone: evicted, and another life of its rank is to come. Away:
  // evicted, and nobody knows of another: the rest does its part.
  enum class Phase : uint64_t {
    absent = 0,
    working = 1,
    waiting = 2,
    at_end = 3,
    left = 4,
    gone = 5,
    away = 6
  };

 private:
  struct Parked {
    SyncVerb verb;
    uint64_t step;
    std::vector<uint64_t> tokens;
  };
  struct Member {
    Phase phase = Phase::absent;
    bool to_come = false;  // the job has grown, and its worker is still starting
    double since = 0.0;
    uint64_t client = 0;
    uint32_t incarnation = 0;
    uint64_t number = 0;               // of its newest question
    uint64_t finished = 0;             // its clock
    uint64_t dropped_next = 0;         // 1 + the last step whose contribution was dropped
    uint64_t epoch = 0;                // the pass that its last units were of, or whose end it is at
    std::vector<UnitName> named = {};  // with its last step
    std::optional<Parked> parked = std::nullopt;
  };
  struct Contribution {
    CommitEntry entry;
    float lr;
    float clip;
  };
  struct Pass {
    WorkLedger ledger;
    uint64_t opened = 0;   // the how manieth it was
    uint32_t workers = 1;  // that its batches are cut for; once it has grown: those that are left
    bool split = false;    // a batch has a unit for each of them
  };

  Status check(const SyncRequest& request) const;
  Status open(const SyncRequest& request);
  Status advance(const SyncRequest& request);
  Status resize(const SyncRequest& request);
  Status ledger_open(const SyncRequest& request, SyncReply& reply);
  void pass_end(const SyncRequest& request);
  void leave(const SyncRequest& request);
  void depart(uint32_t rank, Phase phase);
  std::vector<uint64_t> state() const;

  void enter(Member& member, Phase phase);
  bool is_stale(const SyncRequest& request);
  void park(const SyncRequest& request, uint64_t token);
  void turn_away(const Member& member, size_t tokens);
  void settle();
  bool close_round();
  void grow_passes();
  // For a worker at its end, which knows of so many growths.
  bool has_more(const WorkLedger& ledger, uint64_t growths) const {
    return ledger.available() || (ledger.units() > 0 && growths < growths_ && !SHOAL_MUTANT(growth_untold));
  }
  bool end_pass();
  void make_commit(size_t contributions);
  void answer(uint64_t token, SyncReply reply);
  void answer_ready(Member& member);
  bool counts(const Member& member) const;  // others wait for it
  bool may_start(const Member& member) const;
  bool all_left() const;
  bool knows(const SyncRequest& request) const;
  void give_back(uint32_t rank);
  uint32_t have_come() const;
  Pass& pass(uint64_t epoch);
  uint64_t next_pass(uint64_t epoch) const;  // the first from there on that is not over
  bool is_over(uint64_t epoch) const { return next_pass(epoch) != epoch; }
  void mark_over(uint64_t epoch);
  Contribution contribution(const SyncRequest& request, float weight) const;
  bool takes_back() const { return several_steps_ && config_.take == Take::round; }
  void take_back();
  void go_on_with(const SyncConfig& config);  // after decode: the first of another kind of job is here

  SyncConfig config_;
  bool restored_ = false;                   // and nobody is there yet
  std::vector<Member> members_;             // by rank
  uint64_t round_ = 0;                      // Take::round: the step whose round is open
  std::deque<Contribution> contributions_;  // finished, not in a commit; in order of finishing
  std::vector<CommitEntry> forgotten_;      // to be named by the next commit
  std::deque<Commit> commits_;              // that may not be done everywhere
  uint64_t closed_ = 0;                     // seq of the last commit
  uint64_t dropped_ = 0;
  std::map<uint64_t, Pass> passes_;    // by epoch; those that are over for a while
  std::map<uint64_t, uint64_t> over_;  // passes that are over, as ranges: begin -> end
  uint64_t opened_ = 0;
  uint64_t growths_ = 0;        // how often a pass took in workers that came since it began
  bool several_steps_ = false;  // are made with some batch: the end of a step need not be that of a batch
  double now_ = 0.0;
  std::vector<Answer> ready_;
};

}  // namespace shoal
