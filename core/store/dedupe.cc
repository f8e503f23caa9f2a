#include "store/dedupe.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <utility>

#include "base/mutants.h"
#include "wire/pack.h"

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
  if (push.incarnation < record.incarnation) return;
  if (push.incarnation > record.incarnation)
    record = Record{.incarnation = push.incarnation, .low = 0, .applied = {}};
  record.low = std::max(record.low, push.low);
  std::erase_if(record.applied, [&](const Applied& applied) { return applied.seq < record.low; });
  const size_t size = record.applied.size();
  if (size == record.applied.capacity())
    record.applied.reserve(std::max<size_t>(size + 1, std::min<size_t>(2 * size, kOpenPushesMax)));
}

void Dedupe::record(const PushIdentity& push, uint64_t version) {
  make_room(push);
  Record& record = records_[push.client];
  // Of a life that was fenced meanwhile (the head took its push before it knew): nobody will ask.
  if (push.incarnation < record.incarnation) return;
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
  Record& record = records_[client];
  if (record.incarnation > incarnation) return;
  // The first incarnation has none before it that could come back.
  if (incarnation <= 1)
    records_.erase(client);
  else
    record = Record{.incarnation = incarnation, .low = 0, .applied = {}};
}

uint32_t Dedupe::incarnation(uint64_t client) const {
  const auto it = records_.find(client);
  return it == records_.end() ? 0 : it->second.incarnation;
}

void Dedupe::encode(std::vector<std::byte>& out) const {
  const uint64_t clients = records_.size();
  pack(out, &clients, 1);
  for (const auto& [client, record] : records_) {
    const uint64_t head[] = {client, record.incarnation, record.low, record.applied.size()};
    pack(out, head, 4);
    pack(out, record.applied.data(), record.applied.size());
  }
}

bool Dedupe::decode(std::span<const std::byte>& in) {
  const auto before = std::exchange(records_, {});
  uint64_t clients = 0;
  if (!unpack(in, clients)) return false;
  for (uint64_t i = 0; i < clients; ++i) {
    std::array<uint64_t, 4> head{};
    Record record;
    if (!unpack(in, head) || head[3] > kOpenPushesMax || !unpack(in, record.applied, head[3])) return false;
    record.incarnation = static_cast<uint32_t>(head[1]);
    record.low = head[2];
    records_.emplace(head[0], std::move(record));
  }
  // Incarnations only grow: who was fenced here stays so, whatever the other shard knew.
  for (const auto& [client, record] : before)
    if (record.incarnation > incarnation(client)) fence(client, record.incarnation);
  return true;
}

}  // namespace shoal
