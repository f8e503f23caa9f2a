// Key -> slot of one table in one shard.
//
// Open addressing over buckets of one cache line: five keys, their slots and a count. A key's home
// bucket is `fast_range(low 32 bits of its hash, buckets)`, which keeps the order of hashes, so
//   - capacities need not be powers of two (it grows by half, not by doubling), and
//   - a scan can walk the space of hashes and stay exact while the index grows under it.
// A full bucket spills to the next one; spill buckets lie behind the last home, so nothing wraps.
//
// Growth is incremental: a new array is made beside the old one and every insert moves a few buckets,
// so no push waits for a whole rehash. Not thread-safe; the shard's mutex guards it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "base/grow_array.h"
#include "base/hash.h"

namespace shoal {

class Index {
 public:
  static constexpr uint32_t kAbsent = 0xffffffffu;

  // The slot of `key`, or kAbsent. `hash` is mix64(key).
  uint32_t find(int64_t key, uint64_t hash) const;
  // Asks the cache for the lines that `find` will read.
  void prefetch(uint64_t hash) const;
  // Adds a key that is not present. False when memory is exhausted.
  [[nodiscard]] bool insert(int64_t key, uint64_t hash, uint32_t slot);

  // Makes room for so many keys while there is none: whoever adds them in order of hash would otherwise fill
  // one end of an array that is too small, where each key has all others before it. Without memory: nothing.
  void reserve(size_t keys);

  size_t size() const { return size_; }
  size_t memory_bytes() const { return now_.bytes() + old_.bytes(); }

  // Appends (key, slot) of up to about `limit` keys in order of hash, starting at `cursor` (0 at first);
  // returns the next cursor, or none at the end. Every key present throughout the scan comes once.
  std::optional<uint64_t> scan(uint64_t cursor, size_t limit,
                               std::vector<std::pair<int64_t, uint32_t>>& out) const;

 private:
  struct alignas(64) Bucket {
    int64_t keys[5];
    uint32_t slots[5];
    uint32_t count;
  };
  static_assert(sizeof(Bucket) == 64);

  // An array of buckets; `homes` of them can be a home, the rest take spill-over.
  struct Buckets {
    GrowArray memory;
    uint32_t homes = 0;
    uint32_t total = 0;

    bool make(uint32_t wanted_homes);
    Bucket* at(uint32_t i) { return reinterpret_cast<Bucket*>(memory.data()) + i; }
    const Bucket* at(uint32_t i) const { return reinterpret_cast<const Bucket*>(memory.data()) + i; }
    uint32_t home(uint64_t hash) const { return fast_range(static_cast<uint32_t>(hash), homes); }
    uint32_t find(int64_t key, uint64_t hash) const;
    bool put(int64_t key, uint64_t hash, uint32_t slot);  // false: no room before the end
    void collect(uint64_t low, uint64_t high, std::vector<std::pair<int64_t, uint32_t>>& out) const;
    size_t bytes() const { return memory.capacity(); }
  };

  bool grow();
  bool rebuild();
  bool move_some(uint32_t buckets);

  Buckets now_;
  Buckets old_;            // being emptied while homes > 0
  uint32_t old_next_ = 0;  // buckets of old_ below this are in now_ already
  size_t size_ = 0;
  size_t limit_ = 0;  // size at which to grow
};

}  // namespace shoal
