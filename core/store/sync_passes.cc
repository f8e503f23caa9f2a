// The passes of the sync shard: which there are, how each is cut, and how one that runs takes in workers.
#include <algorithm>

#include "base/mutants.h"
#include "store/sync_shard.h"

namespace shoal {
namespace {

constexpr size_t kPassesKept = 8;
constexpr size_t kPassesTrained = 32;  // at once, by loaders of one job

}  // namespace

Status SyncShard::ledger_open(const SyncRequest& request, SyncReply& reply) {
  reply.step = config_.workers;
  reply.numbers = {0, config_.workers};
  if (is_over(request.epoch) && !passes_.contains(request.epoch)) return {};
  Pass& now = pass(request.epoch);
  now.split = (request.step & kSplit) != 0;
  reply.step = now.workers;
  reply.numbers = {0, now.workers};
  several_steps_ |= (request.step & kSeveralSteps) != 0;
  const uint64_t parts = now.split ? now.workers : 1;
  const uint64_t units = request.count * parts;
  const bool fresh = now.ledger.units() == 0;
  if (fresh && (request.count > kUnitsMax || units > kUnitsMax)) {
    return {Code::bad_input, "a pass of " + std::to_string(request.count) + " batches in " +
                                 std::to_string(parts) + " parts; at most " + std::to_string(kUnitsMax) +
                                 " units are allowed: use larger batches"};
  }
  const uint64_t stride = (request.step & kStatic) != 0 ? now.workers : 0;
  if (fresh) {
    now.ledger = WorkLedger(units, now.workers, stride);
    for (uint32_t rank = 0; rank < members_.size(); ++rank)
      if (members_[rank].phase == Phase::away) now.ledger.abandon(rank);
  }
  const std::vector<WorkLedger::Cut>& cuts = now.ledger.cuts();
  if (!cuts.empty()) reply.numbers.clear();
  for (const auto& [first, workers] : cuts) reply.numbers.insert(reply.numbers.end(), {first, workers});
  // Units of a grown pass are not so many for each batch.
  const uint64_t was = cuts.empty() ? now.ledger.units() : now.ledger.batches(now.split);
  const uint64_t says = cuts.empty() ? units : request.count;
  if (was == says) return {};
  return {Code::mismatch, "epoch " + std::to_string(request.epoch) + " was opened with " +
                              std::to_string(was) + (cuts.empty() ? " units" : " batches") + ", rank " +
                              std::to_string(request.rank) + " says " + std::to_string(says)};
}

// The workers that a pass is cut for. New ones that are still starting are taken in when they are here: cut
// for them, each batch would be trained in two rounds, by the others and then by them. Who is here before one
// of a lower rank waits with it.
uint32_t SyncShard::have_come() const {
  uint32_t workers = 1;
  const auto is_to_come = [](const Member& member) {
    const bool away = member.phase == Phase::gone || member.phase == Phase::left;
    return away && member.to_come && !SHOAL_MUTANT(cut_for_absent);
  };
  while (workers < config_.workers && !is_to_come(members_[workers])) ++workers;
  return workers;
}

SyncShard::Pass& SyncShard::pass(uint64_t epoch) {
  const auto [found, fresh] =
      passes_.try_emplace(epoch, Pass{WorkLedger(0, config_.workers), ++opened_, have_come()});
  if (!fresh || passes_.size() <= kPassesKept) return found->second;
  // The oldest makes room, but for one that is being trained; where those are too many, the loop over it was
  // left before its end.
  const auto trained = [this](const auto& entry) {
    return entry.second.ledger.used() && !is_over(entry.first);
  };
  auto oldest = passes_.end();
  for (auto it = passes_.begin(); it != passes_.end(); ++it) {
    const bool needed = it == found || (trained(*it) && passes_.size() <= kPassesTrained);
    if (!needed && (oldest == passes_.end() || it->second.opened < oldest->second.opened)) oldest = it;
  }
  if (oldest == passes_.end()) return found->second;
  if (trained(*oldest)) mark_over(oldest->first);
  passes_.erase(oldest);
  return found->second;
}

uint64_t SyncShard::next_pass(uint64_t epoch) const {
  const auto after = over_.upper_bound(epoch);
  return after == over_.begin() ? epoch : std::max(epoch, std::prev(after)->second);
}

void SyncShard::mark_over(uint64_t epoch) {
  uint64_t end = epoch + 1;
  if (const auto next = over_.find(end); next != over_.end()) {
    end = next->second;
    over_.erase(next);
  }
  const auto after = over_.upper_bound(epoch);
  if (after != over_.begin() && std::prev(after)->second == epoch)
    std::prev(after)->second = end;
  else
    over_[epoch] = end;
  if (const auto it = passes_.find(epoch); it->second.ledger.units() == 0) passes_.erase(it);  // a barrier
}

// The end of a step is that of a batch only where each batch is stepped with once: a job that is not known to
// do so, which its first two steps show, goes on as it is until the next pass.
void SyncShard::grow_passes() {
  if (several_steps_ || round_ == 0) return;
  const auto in_round = [this](const Member& member) {
    return std::any_of(contributions_.begin(), contributions_.end(), [&](const Contribution& one) {
      return one.entry.client == member.client && one.entry.incarnation == member.incarnation;
    });
  };
  for (auto& [epoch, pass] : passes_) {
    if (pass.workers >= config_.workers || config_.quorum < 1.0 || is_over(epoch)) continue;
    bool ready = true;
    for (uint32_t rank = 0; rank < config_.workers && ready; ++rank) {
      const Member& member = members_[rank];
      // Who has a part has nothing drawn that its step has not named; who has none yet waits for one.
      const bool waits =
          rank < pass.workers ? counts(member) && in_round(member) : member.phase == Phase::at_end;
      ready = (waits && member.epoch == epoch) || SHOAL_MUTANT(grow_anytime);
    }
    if (!ready || !pass.ledger.grow(config_.workers, pass.split)) continue;
    pass.workers = config_.workers;
    ++growths_;
  }
}

}  // namespace shoal
