// The sync shard as bytes: clocks, rounds and the ledger. Whoever goes on from a checkpoint is a new life of
// each rank: nobody is there yet, nothing is leased, and no question waits. A copy of a live one is all of it
// but the questions, which are asked again.
#include <algorithm>
#include <array>

#include "store/sync_shard.h"
#include "wire/pack.h"

namespace shoal {
namespace {

// Passes from here on are barriers: their numbers begin anew with every life of a worker.
constexpr uint64_t kBarriers = uint64_t{1} << 40;
constexpr uint64_t kSplitPass = uint64_t{1} << 32;  // beside the number of its workers

template <typename T>
void pack_all(std::vector<std::byte>& out, const std::vector<T>& values) {
  const uint64_t count = values.size();
  pack(out, &count, 1);
  pack(out, values.data(), values.size());
}

template <typename T>
bool unpack_all(std::span<const std::byte>& in, std::vector<T>& values) {
  uint64_t count = 0;
  return unpack(in, count) && unpack(in, values, count);
}

struct MemberImage {
  uint64_t client, finished, dropped_next, number, epoch, parked_step;
  uint32_t incarnation, phase;
  uint32_t parked_verb;  // 0: it does not wait
  uint32_t to_come;
};

}  // namespace

void WorkLedger::encode(std::vector<std::byte>& out, bool live) const {
  const uint64_t grown = cuts_.empty() ? 0 : cuts_.size() - 1;
  const uint64_t numbers[] = {fresh_, cuts_.empty() ? 0 : cuts_.front().workers,
                              grown * 2 + (leased_ ? 1 : 0)};
  pack(out, numbers, 3);
  if (grown > 0) pack(out, cuts_.data() + 1, grown);
  pack_all(out, by_rank_);
  std::vector<uint32_t> units;    // uses, and whether it is done
  std::vector<uint32_t> holders;  // none in a checkpoint
  for (const Unit& unit : units_) {
    units.push_back(uint32_t{unit.uses} * 2 + (unit.done ? 1 : 0));
    if (live) holders.push_back(unit.holder);
  }
  pack_all(out, units);
  pack_all(out, holders);
  pack_all(out, std::vector<uint64_t>(returned_.begin(), returned_.end()));
}

bool WorkLedger::decode(std::span<const std::byte>& in) {
  std::array<uint64_t, 3> numbers{};
  std::vector<uint32_t> units, holders;
  std::vector<uint64_t> returned;
  std::vector<Cut> grown;
  if (!unpack(in, numbers) || !unpack(in, grown, numbers[2] / 2) || !unpack_all(in, by_rank_) ||
      !unpack_all(in, units) || !unpack_all(in, holders) || !unpack_all(in, returned)) {
    return false;
  }
  fresh_ = numbers[0];
  leased_ = numbers[2] % 2 != 0;
  cuts_.clear();
  if (numbers[1] > kWorkersMax) return false;
  if (numbers[1] > 0) cuts_.push_back({0, numbers[1]});
  for (const Cut& cut : grown) {
    if (cuts_.empty() || cut.workers == 0 || cut.workers > kWorkersMax || cut.first < cuts_.back().first ||
        cut.first > units.size())
      return false;
    cuts_.push_back(cut);
  }
  const bool live = !holders.empty();
  if (units.size() > kUnitsMax || fresh_ > units.size() || (live && holders.size() != units.size()))
    return false;
  units_.assign(units.size(), Unit{});
  held_.assign(by_rank_.size(), 0);
  for (size_t i = 0; i < units.size(); ++i) {
    units_[i].uses = static_cast<uint16_t>(units[i] / 2);
    units_[i].done = units[i] % 2 != 0;
    done_ += units_[i].done ? 1 : 0;
    if (!live) {
      if (i < fresh_ && !units_[i].done) returned_.insert(i);
    } else if (holders[i] != kNobody) {
      if (holders[i] >= held_.size()) return false;
      units_[i].holder = holders[i];
      ++held_[holders[i]];
    }
  }
  for (const uint64_t unit : returned)
    if (unit < units_.size() && !units_[unit].done) returned_.insert(unit);
  return true;
}

std::vector<uint64_t> SyncShard::clocks() const {
  std::vector<uint64_t> clocks;
  for (const Member& member : members_) clocks.push_back(member.finished);
  if (takes_back())
    for (const Contribution& one : contributions_) clocks[one.entry.rank] = one.entry.step;
  return clocks;
}

// Where several steps are made with a batch, what some have handed in for a round that is open is no part of
// a checkpoint: it may be the first step of a batch, whose others would never be made.
void SyncShard::take_back() {
  for (const Contribution& one : contributions_) {
    Member& member = members_[one.entry.rank];
    member.finished = one.entry.step;
    for (const UnitName& name : member.named)
      if (const auto it = passes_.find(name.epoch); it != passes_.end())
        it->second.ledger.undo(one.entry.rank, name.unit);
  }
  contributions_.clear();
}

std::vector<std::byte> SyncShard::encode(bool live) const {
  if (!live && takes_back() && !contributions_.empty()) {
    SyncShard whole = *this;
    whole.take_back();
    return whole.encode(live);
  }
  std::vector<std::byte> out;
  pack(out, &config_, 1);
  // Barriers of a life that is over are nobody's.
  const auto end = live ? passes_.end() : passes_.lower_bound(kBarriers);
  const uint64_t numbers[] = {growths_ * 4 + (several_steps_ ? 2 : 0) + (live ? 1 : 0),
                              members_.size(),
                              round_,
                              closed_,
                              dropped_,
                              opened_,
                              contributions_.size(),
                              commits_.size(),
                              static_cast<uint64_t>(std::distance(passes_.begin(), end))};
  pack(out, numbers, 9);
  for (const Member& member : members_) {
    const MemberImage image{member.client,
                            member.finished,
                            member.dropped_next,
                            member.number,
                            member.epoch,
                            member.parked ? member.parked->step : 0,
                            member.incarnation,
                            static_cast<uint32_t>(member.phase),
                            member.parked ? static_cast<uint32_t>(member.parked->verb) : 0,
                            member.to_come ? 1u : 0u};
    pack(out, &image, 1);
    if (live) pack_all(out, member.named);
  }
  for (const Contribution& one : contributions_) pack(out, &one, 1);
  for (const Commit& commit : commits_) encode_commit(commit, out);
  pack_all(out, forgotten_);
  std::vector<uint64_t> over;
  for (const auto& [begin, last] : over_)
    if (live || begin < kBarriers) over.insert(over.end(), {begin, last});
  pack_all(out, over);
  for (auto it = passes_.begin(); it != end; ++it) {
    const uint64_t split = it->second.split ? kSplitPass : 0;
    const uint64_t head[] = {it->first, it->second.opened, it->second.workers | split};
    pack(out, head, 3);
    it->second.ledger.encode(out, live);
  }
  return out;
}

bool SyncShard::decode(std::span<const std::byte> in) {
  SyncShard anew;
  std::array<uint64_t, 9> numbers{};
  if (!unpack(in, anew.config_) || !unpack(in, numbers) || numbers[1] > kWorkersMax ||
      numbers[1] < anew.config_.workers) {
    return false;
  }
  const bool live = numbers[0] % 2 != 0;
  anew.several_steps_ = numbers[0] / 2 % 2 != 0;
  anew.growths_ = numbers[0] / 4;
  anew.round_ = numbers[2];
  anew.closed_ = numbers[3];
  anew.dropped_ = numbers[4];
  anew.opened_ = numbers[5];
  for (uint64_t i = 0; i < numbers[1]; ++i) {
    MemberImage image{};
    if (!unpack(in, image) || image.phase > static_cast<uint32_t>(Phase::away)) return false;
    Member& member = anew.members_.emplace_back();
    member.finished = image.finished;
    member.dropped_next = image.dropped_next;
    if (live && !unpack_all(in, member.named)) return false;
    if (live) {
      member.client = image.client;
      member.incarnation = image.incarnation;
      member.to_come = image.to_come != 0;
      member.phase = static_cast<Phase>(image.phase);
      member.number = image.number;
      member.epoch = image.epoch;
      // Nobody is answered here, but what it waits for lets it go on here too.
      if (image.parked_verb != 0)
        member.parked.emplace(Parked{static_cast<SyncVerb>(image.parked_verb), image.parked_step, {}});
    } else if (i >= anew.config_.workers) {
      member.phase = Phase::left;  // the job had become smaller: nobody waits for it
    }
  }
  for (uint64_t i = 0; i < numbers[6]; ++i) {
    Contribution one{};
    if (!unpack(in, one) || one.entry.rank >= anew.members_.size()) return false;
    anew.contributions_.push_back(one);
  }
  for (uint64_t i = 0; i < numbers[7]; ++i) {
    Commit commit;
    if (!decode_commit(in, commit)) return false;
    anew.commits_.push_back(std::move(commit));
  }
  std::vector<uint64_t> over;
  if (!unpack_all(in, anew.forgotten_) || !unpack_all(in, over) || over.size() % 2 != 0) return false;
  for (size_t i = 0; i < over.size(); i += 2) anew.over_[over[i]] = over[i + 1];
  for (uint64_t i = 0; i < numbers[8]; ++i) {
    std::array<uint64_t, 3> head{};
    Pass pass{.ledger = WorkLedger(0, 1)};
    if (!unpack(in, head) || !pass.ledger.decode(in)) return false;
    pass.opened = head[1];
    pass.workers = static_cast<uint32_t>(head[2]);
    pass.split = (head[2] & kSplitPass) != 0;
    for (uint32_t rank = anew.config_.workers; !live && rank < pass.workers && rank < numbers[1]; ++rank)
      if (!anew.is_over(head[0])) pass.ledger.abandon(rank);
    anew.passes_.insert_or_assign(head[0], std::move(pass));
  }
  if (!in.empty()) return false;
  anew.restored_ = !live && !anew.members_.empty();
  *this = std::move(anew);
  return true;
}

// What was finished counts, and everybody starts at the same step. A pass stays cut as it is: parts of ranks
// that are no more are for the others.
void SyncShard::go_on_with(const SyncConfig& config) {
  if (!contributions_.empty()) make_commit(contributions_.size());
  uint64_t furthest = round_;
  for (const Member& member : members_) furthest = std::max(furthest, member.finished);
  config_ = config;
  round_ = furthest;
  members_.assign(config.workers, Member{.since = now_, .finished = furthest});
  for (auto& [epoch, pass] : passes_)
    for (uint32_t rank = config.workers; rank < pass.workers; ++rank) pass.ledger.abandon(rank);
}

}  // namespace shoal
