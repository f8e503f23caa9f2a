// The sync shard as bytes: what a checkpoint keeps of clocks, rounds and the ledger. Whoever goes on from
// them is a new life of each rank: nobody is there yet, nothing is leased, and no question waits.
#include <algorithm>
#include <array>

#include "store/sync_shard.h"
#include "wire/pack.h"

namespace shoal {
namespace {

// Passes from here on are barriers: their numbers begin anew with every life of a worker.
constexpr uint64_t kBarriers = uint64_t{1} << 40;

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
  uint64_t client, finished, dropped_next;
  uint32_t incarnation, reserved;
};

}  // namespace

void WorkLedger::encode(std::vector<std::byte>& out) const {
  pack(out, &fresh_, 1);
  pack_all(out, by_rank_);
  std::vector<uint32_t> units;  // uses, and whether it is done
  for (const Unit& unit : units_) units.push_back(uint32_t{unit.uses} * 2 + (unit.done ? 1 : 0));
  pack_all(out, units);
}

bool WorkLedger::decode(std::span<const std::byte>& in, size_t workers) {
  std::vector<uint32_t> units;
  if (!unpack(in, fresh_) || !unpack_all(in, by_rank_) || !unpack_all(in, units)) return false;
  if (units.size() > kUnitsMax || fresh_ > units.size() || by_rank_.size() != workers) return false;
  units_.assign(units.size(), Unit{});
  held_.assign(by_rank_.size(), 0);
  for (size_t i = 0; i < units.size(); ++i) {
    units_[i].uses = static_cast<uint16_t>(units[i] / 2);
    units_[i].done = units[i] % 2 != 0;
    done_ += units_[i].done ? 1 : 0;
    if (i < fresh_ && !units_[i].done) returned_.insert(i);
  }
  leased_ = fresh_ > 0;
  return true;
}

void WorkLedger::cut_anew(uint32_t workers) {
  const size_t parts = by_rank_.size();
  const size_t batches = units_.size() / parts;
  WorkLedger anew(batches * workers, workers);
  for (size_t batch = 0; batch < batches; ++batch) {
    const auto first = units_.begin() + static_cast<ptrdiff_t>(batch * parts);
    const auto last = first + static_cast<ptrdiff_t>(parts);
    if (!std::all_of(first, last, [](const Unit& unit) { return unit.done; })) continue;
    for (size_t unit = batch * workers; unit < (batch + 1) * workers; ++unit) {
      anew.units_[unit].done = true;
      anew.units_[unit].uses = first->uses;
      ++anew.done_;
    }
  }
  *this = std::move(anew);
}

std::vector<uint64_t> SyncShard::clocks() const {
  std::vector<uint64_t> clocks;
  for (const Member& member : members_) clocks.push_back(member.finished);
  return clocks;
}

std::vector<std::byte> SyncShard::encode() const {
  std::vector<std::byte> out;
  pack(out, &config_, 1);
  const auto passes = std::distance(passes_.begin(), passes_.lower_bound(kBarriers));
  const uint64_t numbers[] = {members_.size(),
                              round_,
                              closed_,
                              dropped_,
                              contributions_.size(),
                              commits_.size(),
                              static_cast<uint64_t>(passes)};
  pack(out, numbers, 7);
  for (const Member& member : members_) {
    const MemberImage image{member.client, member.finished, member.dropped_next, member.incarnation, 0};
    pack(out, &image, 1);
  }
  for (const Contribution& one : contributions_) pack(out, &one, 1);
  for (const Commit& commit : commits_) encode_commit(commit, out);
  pack_all(out, forgotten_);
  for (const auto& [epoch, pass] : passes_) {
    if (epoch >= kBarriers) break;
    const uint64_t head[] = {epoch, pass.over ? 1u : 0u};
    pack(out, head, 2);
    pass.ledger.encode(out);
  }
  return out;
}

bool SyncShard::decode(std::span<const std::byte> in) {
  SyncShard anew;
  std::array<uint64_t, 7> numbers{};
  if (!unpack(in, anew.config_) || !unpack(in, numbers) || numbers[0] > kWorkersMax ||
      numbers[0] != anew.config_.workers) {
    return false;
  }
  anew.round_ = numbers[1];
  anew.closed_ = numbers[2];
  anew.dropped_ = numbers[3];
  for (uint64_t i = 0; i < numbers[0]; ++i) {
    MemberImage image{};
    if (!unpack(in, image)) return false;
    anew.members_.push_back({.client = image.client,
                             .incarnation = image.incarnation,
                             .finished = image.finished,
                             .dropped_next = image.dropped_next});
  }
  for (uint64_t i = 0; i < numbers[4]; ++i) {
    Contribution one{};
    if (!unpack(in, one) || one.entry.rank >= anew.members_.size()) return false;
    anew.contributions_.push_back(one);
  }
  for (uint64_t i = 0; i < numbers[5]; ++i) {
    Commit commit;
    if (!decode_commit(in, commit)) return false;
    anew.commits_.push_back(std::move(commit));
  }
  if (!unpack_all(in, anew.forgotten_)) return false;
  for (uint64_t i = 0; i < numbers[6]; ++i) {
    std::array<uint64_t, 2> head{};
    Pass pass{WorkLedger(0, 1)};
    if (!unpack(in, head) || !pass.ledger.decode(in, anew.members_.size())) return false;
    pass.over = head[1] != 0;
    anew.passes_.insert_or_assign(head[0], std::move(pass));
  }
  if (!in.empty()) return false;
  anew.restored_ = !anew.members_.empty();
  *this = std::move(anew);
  return true;
}

// What was finished counts, whole batches stay done, and everybody starts at the same step.
void SyncShard::go_on_with(const SyncConfig& config) {
  if (!contributions_.empty()) make_commit(contributions_.size());
  uint64_t furthest = round_;
  for (const Member& member : members_) furthest = std::max(furthest, member.finished);
  const bool resized = config.workers != config_.workers;
  config_ = config;
  round_ = furthest;
  members_.assign(config.workers, Member{.since = now_, .finished = furthest});
  for (auto& [epoch, pass] : passes_)
    if (resized) pass.ledger.cut_anew(config.workers);
}

}  // namespace shoal
