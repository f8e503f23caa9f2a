#include "store/index.h"

#include <algorithm>

namespace shoal {
namespace {

constexpr uint32_t kPerBucket = 5;
constexpr uint32_t kHomesMin = 2;
constexpr uint64_t kHomesMax = 0xf0000000u;
// Buckets moved per insert while growing. From size n the index grows to hold 1.5 n, so it must be
// empty of the old array within n/2 inserts: n / (0.8 * 5) buckets over n/2 inserts is half a bucket
// an insert; four leaves a wide margin and stays within a microsecond.
constexpr uint32_t kMovedPerInsert = 4;

uint32_t spill_buckets(uint32_t homes) { return 4 + homes / 64; }

// 80 % full: buckets of five keep probes at about 1.1 lines.
size_t limit_of(uint32_t homes) { return size_t{homes} * kPerBucket * 4 / 5; }

}  // namespace

bool Index::Buckets::make(uint32_t wanted_homes) {
  homes = wanted_homes;
  total = wanted_homes + spill_buckets(wanted_homes);
  memory.reset();
  return memory.reserve(size_t{total} * sizeof(Bucket));
}

uint32_t Index::Buckets::find(int64_t key, uint64_t hash) const {
  for (uint32_t i = home(hash); i < total; ++i) {
    const Bucket& bucket = *at(i);
    for (uint32_t j = 0; j < bucket.count; ++j)
      if (bucket.keys[j] == key) return bucket.slots[j];
    if (bucket.count < kPerBucket) return kAbsent;
  }
  return kAbsent;
}

bool Index::Buckets::put(int64_t key, uint64_t hash, uint32_t slot) {
  for (uint32_t i = home(hash); i < total; ++i) {
    Bucket& bucket = *at(i);
    if (bucket.count < kPerBucket) {
      bucket.keys[bucket.count] = key;
      bucket.slots[bucket.count] = slot;
      ++bucket.count;
      return true;
    }
  }
  return false;
}

uint32_t Index::find(int64_t key, uint64_t hash) const {
  if (now_.homes == 0) return kAbsent;
  const uint32_t slot = now_.find(key, hash);
  if (slot != kAbsent || old_.homes == 0) return slot;
  return old_.find(key, hash);
}

void Index::prefetch(uint64_t hash) const {
  if (now_.homes != 0) __builtin_prefetch(now_.at(now_.home(hash)));
}

bool Index::insert(int64_t key, uint64_t hash, uint32_t slot) {
  if (size_ >= limit_ && !grow()) return false;
  if (old_.homes != 0 && !move_some(kMovedPerInsert)) return false;
  // A rebuild makes room for what is there, and for this key perhaps only the next one does.
  while (!now_.put(key, hash, slot))
    if (!rebuild()) return false;
  ++size_;
  return true;
}

void Index::reserve(size_t keys) {
  const uint64_t homes = keys / (kPerBucket * 4 / 5) + 1;
  if (size_ != 0 || keys <= limit_ || homes > kHomesMax) return;
  Buckets made;
  if (!made.make(static_cast<uint32_t>(homes))) return;
  now_ = std::move(made);
  limit_ = limit_of(now_.homes);
}

// Keys that cluster at the very end can fill the spill buckets before the array is 80 % full. It takes
// hashes chosen on purpose, or very bad luck: everything is moved at once into a larger array.
bool Index::rebuild() {
  uint64_t homes = now_.homes;
  for (int attempt = 0; attempt < 6; ++attempt) {
    homes = homes * 3 / 2 + 1;
    Buckets bigger;
    if (homes > kHomesMax || !bigger.make(static_cast<uint32_t>(homes))) return false;
    const auto copy = [&bigger](const Buckets& from, uint32_t first) {
      for (uint32_t i = first; i < from.total; ++i) {
        const Bucket& bucket = *from.at(i);
        for (uint32_t j = 0; j < bucket.count; ++j) {
          const uint64_t hash = mix64(static_cast<uint64_t>(bucket.keys[j]));
          if (bigger.find(bucket.keys[j], hash) == kAbsent &&
              !bigger.put(bucket.keys[j], hash, bucket.slots[j])) {
            return false;
          }
        }
      }
      return true;
    };
    if (copy(now_, 0) && copy(old_, old_next_)) {
      now_ = std::move(bigger);
      old_ = Buckets{};
      limit_ = limit_of(now_.homes);
      return true;
    }
  }
  return false;
}

bool Index::grow() {
  // Rare: the old array must be empty before there can be another one.
  if (old_.homes != 0 && !move_some(old_.total)) return false;
  Buckets bigger;
  const uint64_t homes = std::max<uint64_t>(kHomesMin, uint64_t{now_.homes} * 3 / 2 + 1);
  if (homes > kHomesMax || !bigger.make(static_cast<uint32_t>(homes))) return false;
  old_ = std::move(now_);
  now_ = std::move(bigger);
  old_next_ = 0;
  limit_ = limit_of(now_.homes);
  if (old_.homes == 0) old_ = Buckets{};
  return true;
}

bool Index::move_some(uint32_t buckets) {
  // A moved bucket keeps its content and its count: later buckets' probes pass through it. Readers find
  // moved keys in now_ first, so the stale copies are never seen twice by `find`; `scan` skips them.
  const uint32_t end = static_cast<uint32_t>(std::min<uint64_t>(old_.total, uint64_t{old_next_} + buckets));
  for (; old_next_ < end; ++old_next_) {
    const Bucket& bucket = *old_.at(old_next_);
    for (uint32_t j = 0; j < bucket.count; ++j) {
      const uint64_t hash = mix64(static_cast<uint64_t>(bucket.keys[j]));
      // A half-moved bucket is fine: what is in now_ already is skipped by the copy of `rebuild`.
      if (!now_.put(bucket.keys[j], hash, bucket.slots[j])) return rebuild();
    }
  }
  if (old_next_ == old_.total) old_ = Buckets{};
  return true;
}

void Index::Buckets::collect(uint64_t low, uint64_t high,
                             std::vector<std::pair<int64_t, uint32_t>>& out) const {
  if (homes == 0) return;
  const uint32_t last_home = home(high - 1);
  for (uint32_t i = home(low); i < total; ++i) {
    const Bucket& bucket = *at(i);
    for (uint32_t j = 0; j < bucket.count; ++j) {
      const uint64_t hash32 = static_cast<uint32_t>(mix64(static_cast<uint64_t>(bucket.keys[j])));
      if (hash32 >= low && hash32 < high) out.emplace_back(bucket.keys[j], bucket.slots[j]);
    }
    if (i >= last_home && bucket.count < kPerBucket) return;
  }
}

std::optional<uint64_t> Index::scan(uint64_t cursor, size_t limit,
                                    std::vector<std::pair<int64_t, uint32_t>>& out) const {
  constexpr uint64_t kEnd = uint64_t{1} << 32;
  if (size_ == 0 || cursor >= kEnd) return std::nullopt;
  // Hashes are uniform: this span holds about `limit` keys.
  const uint64_t span = std::max<uint64_t>(1, kEnd / size_ * std::max<size_t>(1, limit));
  const uint64_t high = std::min(kEnd, cursor + std::min(span, kEnd));
  now_.collect(cursor, high, out);
  const size_t seen = out.size();
  old_.collect(cursor, high, out);
  // While growing, a key may lie in both arrays: keep the copies of old_ that are not yet in now_.
  const auto moved = [&](const std::pair<int64_t, uint32_t>& entry) {
    return now_.find(entry.first, mix64(static_cast<uint64_t>(entry.first))) != kAbsent;
  };
  out.erase(std::remove_if(out.begin() + static_cast<ptrdiff_t>(seen), out.end(), moved), out.end());
  if (high >= kEnd) return std::nullopt;
  return high;
}

}  // namespace shoal
