#include "store/work_ledger.h"

#include "base/mutants.h"

namespace shoal {

std::vector<WorkLedger::Range> WorkLedger::lease(uint32_t rank, uint64_t want, bool overdue) {
  std::vector<Range> ranges;
  leased_ = true;
  make_room(rank);
  const auto take = [&](uint64_t unit) {
    units_[unit].holder = rank;
    ++held_[rank];
    --want;
    if (!ranges.empty() && ranges.back().second == unit)
      ++ranges.back().second;
    else
      ranges.emplace_back(unit, unit + 1);
  };
  while (want > 0 && !returned_.empty()) take(returned_.extract(returned_.begin()).value());
  for (; want > 0 && cuts_.empty() && fresh_ < units_.size(); ++fresh_)
    if (!units_[fresh_].done) take(fresh_);
  if (SHOAL_MUTANT(leased_twice) && cuts_.empty() && fresh_ > 0) --fresh_;
  if (!overdue || !ranges.empty()) return ranges;
  for (uint64_t unit = 0; want > 0 && unit < units_.size(); ++unit) {
    Unit& u = units_[unit];
    if (u.holder == kNobody || u.holder == rank || u.stays) continue;
    release(u);
    take(unit);
    u.stays = true;
  }
  return ranges;
}

bool WorkLedger::keep(uint32_t rank, uint64_t unit) {
  if (SHOAL_MUTANT(kept_though_taken)) return true;
  if (unit >= units_.size() || units_[unit].holder != rank) return false;
  return units_[unit].stays = true;
}

void WorkLedger::release(Unit& unit) {
  if (unit.holder != kNobody) --held_[unit.holder];
  unit.holder = kNobody;
  unit.stays = false;
}

void WorkLedger::done(uint32_t rank, uint64_t unit) {
  if (unit >= units_.size()) return;
  make_room(rank);
  Unit& u = units_[unit];
  if (u.uses != 0xffff) ++u.uses;
  ++by_rank_[rank];
  if (u.done) return;
  u.done = true;
  ++done_;
  release(u);
  returned_.erase(unit);
}

void WorkLedger::undo(uint32_t rank, uint64_t unit) {
  if (unit >= units_.size() || !units_[unit].done || rank >= by_rank_.size()) return;
  Unit& u = units_[unit];
  u.done = false;
  --u.uses;
  --by_rank_[rank];
  --done_;
}

void WorkLedger::give_back(uint32_t rank, uint64_t unit) {
  if (unit >= units_.size() || units_[unit].holder != rank) return;
  release(units_[unit]);
  returned_.insert(unit);
}

void WorkLedger::give_back_all(uint32_t rank) {
  make_room(rank);
  for (uint64_t unit = 0; held_[rank] > 0 && unit < units_.size(); ++unit) give_back(rank, unit);
}

template <typename Visit>
void WorkLedger::visit_own(uint32_t rank, Visit visit) const {
  for (size_t i = 0; i < cuts_.size(); ++i)
    for (uint64_t unit = cuts_[i].first + rank; rank < cuts_[i].workers && unit < end_of(i);
         unit += cuts_[i].workers)
      visit(unit);
}

void WorkLedger::abandon(uint32_t rank) {
  visit_own(rank, [this](uint64_t unit) {
    if (!units_[unit].done && units_[unit].holder == kNobody) returned_.insert(unit);
  });
}

bool WorkLedger::grow(uint32_t workers, bool split) {
  if (cuts_.empty() || !used()) return false;
  const Cut last = cuts_.back();
  uint64_t begun = units();
  while (begun > last.first && !units_[begun - 1].done && units_[begun - 1].holder == kNobody) --begun;
  const uint64_t parts = split ? last.workers : 1;
  const uint64_t first = last.first + (begun - last.first + parts - 1) / parts * parts;
  const uint64_t batches = (units() - first) / parts;
  const uint64_t total = first + batches * (split ? workers : 1);
  if (batches == 0 || total > kUnitsMax) return false;
  returned_.erase(returned_.lower_bound(first), returned_.end());
  units_.resize(first);
  units_.resize(total);
  cuts_.push_back({first, workers});
  return true;
}

uint64_t WorkLedger::batches(bool split) const {
  uint64_t found = split ? 0 : units();
  for (size_t i = 0; split && i < cuts_.size(); ++i) found += (end_of(i) - cuts_[i].first) / cuts_[i].workers;
  return found;
}

// The number of workers may have grown since the pass began.
void WorkLedger::make_room(uint32_t rank) {
  if (rank < held_.size()) return;
  held_.resize(rank + 1);
  by_rank_.resize(rank + 1);
}

std::vector<uint64_t> WorkLedger::done_of(uint32_t rank) const {
  std::vector<uint64_t> done;
  visit_own(rank, [&](uint64_t unit) {
    if (units_[unit].done || units_[unit].holder != kNobody || returned_.contains(unit)) done.push_back(unit);
  });
  return done;
}

std::vector<uint64_t> WorkLedger::report() const {
  std::vector<uint64_t> numbers{units(), done_};
  numbers.insert(numbers.end(), by_rank_.begin(), by_rank_.end());
  const size_t histogram = numbers.size();
  for (const Unit& unit : units_) {
    if (numbers.size() <= histogram + unit.uses) numbers.resize(histogram + unit.uses + 1);
    ++numbers[histogram + unit.uses];
  }
  return numbers;
}

}  // namespace shoal
