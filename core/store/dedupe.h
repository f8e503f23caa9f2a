// Which pushes a shard has applied, per client: what makes a push take effect exactly once, whatever is
// retried, duplicated or reordered on the way.
//
// A push is named by (client, incarnation, seq). Every message also carries `low`: all seqs below it are
// acknowledged everywhere, so nobody will ever ask about them again in earnest. A client keeps at most
// 256 seqs open, so a shard needs records for [low, low + 256) only; anything lower is a duplicate.
// The record is written in the critical section of the update itself.
//
// What it may grow to: about 100 bytes for every name that was taken a second time, of which the coordinator
// grants 100,000, and up to 4 KiB for a client that is there or has died without a goodbye, until its name
// is taken again. A dead one cannot be told from one that is slow, so it is not dropped before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace shoal {

inline constexpr uint64_t kOpenPushesMax = 256;

struct PushIdentity {
  uint64_t client = 0;
  uint32_t incarnation = 0;
  uint64_t seq = 0;
  uint64_t low = 0;
};

class Dedupe {
 public:
  enum class Verdict { fresh, duplicate, fenced, outside_window };

  struct Answer {
    Verdict verdict;
    uint64_t version;  // of a duplicate: that of its update where still known, else 0
  };

  Answer check(const PushIdentity& push) const;
  // Makes the memory for a record: what can fail, fails before the update. Then, once the push was applied
  // as `version`, `record` cannot.
  void make_room(const PushIdentity& push);
  void record(const PushIdentity& push, uint64_t version);
  // From now on only this incarnation (or a newer one) of the client is heard.
  void fence(uint64_t client, uint32_t incarnation);

  // Drops the seqs of an incarnation that will never be heard again. That the ones before it are fenced stays
  // known: one that slept may come back at any time.
  void forget(uint64_t client, uint32_t incarnation);
  // The newest that was heard of; 0: none.
  uint32_t incarnation(uint64_t client) const;

  size_t clients() const { return records_.size(); }

  // All records, for another shard to go on with.
  void encode(std::vector<std::byte>& out) const;
  bool decode(std::span<const std::byte>& in);  // false: not the records of a shard

 private:
  struct Applied {
    uint64_t seq;
    uint64_t version;
  };
  struct Record {
    uint32_t incarnation = 0;
    uint64_t low = 0;
    std::vector<Applied> applied;  // seqs >= low, at most kOpenPushesMax of them
  };

  std::unordered_map<uint64_t, Record> records_;
};

}  // namespace shoal
