// The units of one pass over the data: which are handed out, to whom, and which are done. A unit that comes
// back undone is handed out again, and how often each was used is kept, so that a pass can show that it
// read everything. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <utility>
#include <vector>

namespace shoal {

inline constexpr uint64_t kUnitsMax = uint64_t{1} << 24;

class WorkLedger {
 public:
  using Range = std::pair<uint64_t, uint64_t>;  // begin, end
  // From unit `first` on rank r of n has every n-th unit, first + r, without asking.
  struct Cut {
    uint64_t first;
    uint64_t workers;
  };

  // With a stride, rank r has every stride-th unit from r on without asking, and only what comes back is
  // leased.
  WorkLedger(uint64_t units, uint32_t workers, uint64_t stride = 0)
      : units_(units), held_(workers), by_rank_(workers) {
    if (stride > 0) cuts_.push_back({0, stride});
  }

  uint64_t units() const { return units_.size(); }
  bool complete() const { return done_ == units_.size(); }
  bool used() const { return done_ > 0; }
  // Whether a worker that came to the end can get more.
  bool available() const {
    return !returned_.empty() || (leased_ && cuts_.empty() && fresh_ < units_.size());
  }
  const std::vector<Cut>& cuts() const { return cuts_; }  // none where units are leased
  uint32_t ranks() const { return static_cast<uint32_t>(by_rank_.size()); }

  // `overdue`: where nothing else is left, what others hold is taken from them, once.
  std::vector<Range> lease(uint32_t rank, uint64_t want, bool overdue = false);
  // Whether it is still that rank's; if so nobody takes it over.
  bool keep(uint32_t rank, uint64_t unit);
  // Units outside the pass are ignored. One that nobody leased may be done, too: its owner is then known
  // without asking.
  void done(uint32_t rank, uint64_t unit);
  void undo(uint32_t rank, uint64_t unit);  // it was done, and is to be done again
  void give_back(uint32_t rank, uint64_t unit);
  void give_back_all(uint32_t rank);
  // What it has without asking is leased to others.
  void abandon(uint32_t rank);
  // So many workers train what is behind the last batch of which anything is done or held; with `split` a
  // batch has a unit for each. False: nothing has changed, for there is too little left, or too much.
  bool grow(uint32_t workers, bool split);
  // Batches of a pass that is not leased.
  uint64_t batches(bool split) const;

  // Of the units that it has without asking: those that are done, or others' by now.
  std::vector<uint64_t> done_of(uint32_t rank) const;

  // sync_image.cc. Where it is not `live` what was handed out and not done is to be handed out again.
  void encode(std::vector<std::byte>& out, bool live) const;
  bool decode(std::span<const std::byte>& in);  // false: not a ledger

  // units, done, then units done by each rank, then how many units were used 0, 1, 2, ... times.
  std::vector<uint64_t> report() const;

 private:
  static constexpr uint32_t kNobody = 0xffffffff;
  struct Unit {
    uint32_t holder = kNobody;
    uint16_t uses = 0;
    bool done = false;
    bool stays = false;  // with its holder: it was taken over from one that was late, or is being used
  };
  void release(Unit& unit);
  template <typename Visit>
  void visit_own(uint32_t rank, Visit visit) const;
  uint64_t end_of(size_t cut) const { return cut + 1 < cuts_.size() ? cuts_[cut + 1].first : units(); }
  void make_room(uint32_t rank);

  std::vector<Unit> units_;
  std::vector<uint64_t> held_;     // by rank
  std::vector<uint64_t> by_rank_;  // done
  std::set<uint64_t> returned_;
  uint64_t fresh_ = 0;  // the first that was never leased
  uint64_t done_ = 0;
  bool leased_ = false;
  std::vector<Cut> cuts_;
};

}  // namespace shoal
