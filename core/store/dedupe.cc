#include "store/dedupe.h"

#include <algorithm>
#include <cassert>

#include "base/mutants.h"

namespace shoal {

Dedupe::Answer Dedupe::check(const PushIdentity& push) const {
  const auto it = records_.find(push.client);
  const bool known = it != records_.end();
  if (known && push.incarnation < it->second.incarnation && !SHOAL_MUTANT(accept_old_incarnation))
    return {Verdict::fenced, 0};
  // A record of an older incarnation says nothing about the seqs of this one.
  const Record* record = known && push.incarnation == it->second.incarnation ? &it->second : nullptr;
  const uint64_t low = std::max(push.low, record != nullptr ? record->low : 0);
  if (push.seq >= low + kOpenPushesMax) return {Verdict::outside_window, 0};
  if (SHOAL_MUTANT(dedupe_off)) return {Verdict::fresh, 0};
  if (record == nullptr) return {Verdict::fresh, 0};
  if (push.seq < record->low && !SHOAL_MUTANT(forget_below_low)) return {Verdict::duplicate, 0};
  for (const Applied& applied : record->applied)
    if (applied.seq == push.seq || (applied.seq > push.seq && SHOAL_MUTANT(newest_only)))
      return {Verdict::duplicate, applied.version};
  return {Verdict::fresh, 0};
}

void Dedupe::make_room(const PushIdentity& push) {
  Record& record = records_[push.client];
  if (push.incarnation > record.incarnation)
    record = Record{.incarnation = push.incarnation, .low = 0, .applied = {}};
  record.low = std::max(record.low, push.low);
  std::erase_if(record.applied, [&](const Applied& applied) { return applied.seq < record.low; });
  if (record.applied.size() == record.applied.capacity())
    record.applied.reserve(2 * record.applied.size() + 1);
}

void Dedupe::record(const PushIdentity& push, uint64_t version) {
  make_room(push);
  Record& record = records_[push.client];
  record.applied.push_back({push.seq, version});
  if (SHOAL_MUTANT(few_records) && record.applied.size() > 2) record.applied.erase(record.applied.begin());
  assert(record.applied.size() <= kOpenPushesMax || SHOAL_MUTANT(dedupe_off) ||
         SHOAL_MUTANT(accept_old_incarnation));
}

void Dedupe::fence(uint64_t client, uint32_t incarnation) {
  Record& record = records_[client];
  if (incarnation > record.incarnation || SHOAL_MUTANT(reconnect_forgets))
    record = Record{.incarnation = incarnation, .low = 0, .applied = {}};
}

void Dedupe::forget(uint64_t client, uint32_t incarnation) {
  const auto it = records_.find(client);
  if (it != records_.end() && it->second.incarnation <= incarnation) records_.erase(it);
}

}  // namespace shoal
