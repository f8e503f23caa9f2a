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

  WorkLedger(uint64_t units, uint32_t workers) : units_(units), held_(workers), by_rank_(workers) {}

  uint64_t units() const { return units_.size(); }
  bool complete() const { return done_ == units_.size(); }
  // Whether a worker that came to the end can get more.
  bool available() const { return !returned_.empty() || (leased_ && fresh_ < units_.size()); }

  std::vector<Range> lease(uint32_t rank, uint64_t want);
  // Units outside the pass are ignored. One that nobody leased may be done, too: its owner is then known
  // without asking.
  void done(uint32_t rank, uint64_t unit);
  void give_back(uint32_t rank, uint64_t unit);
  void give_back_all(uint32_t rank);

  // As a checkpoint keeps it; what was handed out and not done is to be handed out again. sync_image.cc
  void encode(std::vector<std::byte>& out) const;
  bool decode(std::span<const std::byte>& in, size_t workers);  // false: not a ledger of so many
  // Each batch in as many parts as there are workers now; one that is done in part is to be done again.
  void cut_anew(uint32_t workers);

  // units, done, then units done by each rank, then how many units were used 0, 1, 2, ... times.
  std::vector<uint64_t> report() const;

 private:
  static constexpr uint32_t kNobody = 0xffffffff;
  struct Unit {
    uint32_t holder = kNobody;
    uint16_t uses = 0;
    bool done = false;
  };
  void release(Unit& unit);

  std::vector<Unit> units_;
  std::vector<uint64_t> held_;     // by rank
  std::vector<uint64_t> by_rank_;  // done
  std::set<uint64_t> returned_;
  uint64_t fresh_ = 0;  // the first that was never leased
  uint64_t done_ = 0;
  bool leased_ = false;
};

}  // namespace shoal
