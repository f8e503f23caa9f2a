#include "store/staging.h"

#include <algorithm>
#include <array>

#include "base/mutants.h"
#include "wire/pack.h"

namespace shoal {

Staging::Part Staging::copy(const PushPart& part, const TableSpec& spec) {
  Part copy{.table = part.table,
            .lr = part.lr,
            .stride = spec.floats(0),
            .version_read = part.version_read,
            .by_staleness = part.by_staleness};
  copy.keys.assign(part.keys.begin(), part.keys.end());
  copy.rows = std::make_unique_for_overwrite<float[]>(copy.keys.size() * copy.stride);
  const std::byte* from = part.values.data();
  float* to = copy.rows.get();
  if (!spec.dense) {
    decode_rows(part.codec, from, copy.keys.size(), copy.stride, to);
    return copy;
  }
  for (const int64_t key : copy.keys) {  // the last piece may be shorter than the others
    const uint32_t floats = spec.floats(key);
    decode_rows(part.codec, from, 1, floats, to);
    std::fill(to + floats, to + copy.stride, 0.0f);
    from += encoded_bytes(part.codec, floats);
    to += copy.stride;
  }
  return copy;
}

Status Staging::add(const PushIdentity* identity, uint32_t rank, uint64_t step,
                    std::span<const PushPart> parts, const SpecOf& spec_of, bool bounded) {
  std::vector<Part> copies;
  uint64_t bytes = 0;
  for (const PushPart& part : parts) {
    copies.push_back(copy(part, spec_of(part.table)));
    bytes += part.keys.size() * (8 + uint64_t{4} * copies.back().stride);
  }
  const Name name{rank, step, identity == nullptr ? 0 : identity->client,
                  identity == nullptr ? 0 : identity->incarnation};
  Contribution& contribution = staged_[name];
  contribution.parts.reserve(contribution.parts.size() + copies.size());
  // Nothing fails below but by refusal.
  const uint64_t before = budget_->used.fetch_add(bytes);
  if (bounded && before + bytes > budget_->bytes_max) {
    budget_->used -= bytes;
    if (contribution.parts.empty()) staged_.erase(name);
    return {Code::refused, "staged pushes take " + std::to_string(before) + " bytes, and rank " +
                               std::to_string(rank) + " brings " + std::to_string(bytes) + " more for step " +
                               std::to_string(step) + "; at most " + std::to_string(budget_->bytes_max) +
                               " may wait for a commit: use more servers or smaller batches"};
  }
  bytes_ += bytes;
  contribution.bytes += bytes;
  for (Part& part : copies) contribution.parts.push_back(std::move(part));
  return {};
}

Staging::Sum Staging::merge(const Weighted& parts) {
  const Part& first = *parts[0].first;
  Sum sum{.table = first.table, .lr = first.lr, .stride = first.stride};
  if (parts.size() == 1 && parts[0].second == 1.0f) {
    sum.keys = first.keys;
    sum.rows = first.rows.get();
    return sum;
  }
  std::vector<int64_t> keys;
  std::vector<Merger::WeightedRow> rows;
  for (const auto& [part, weight] : parts) {
    keys.insert(keys.end(), part->keys.begin(), part->keys.end());
    for (size_t i = 0; i < part->keys.size(); ++i)
      rows.push_back({part->rows.get() + i * part->stride, weight});
  }
  sum.merged_keys.resize(keys.size());
  sum.merged = std::make_unique_for_overwrite<float[]>(keys.size() * sum.stride);
  const uint32_t distinct =
      merger_.merge(keys, rows.data(), sum.stride, sum.merged_keys.data(), sum.merged.get());
  sum.keys = std::span(sum.merged_keys).first(distinct);
  sum.rows = sum.merged.get();
  return sum;
}

std::vector<Staging::Sum>& Staging::sums(const Commit& commit, uint64_t version) {
  if (summed_ == commit.seq) return sums_;
  std::map<uint32_t, Weighted> tables;
  for (const CommitEntry& entry : commit.entries) {
    auto it = staged_.find({entry.rank, entry.step, entry.client, entry.incarnation});
    if (SHOAL_MUTANT(any_life)) it = staged_.lower_bound({entry.rank, entry.step, 0, 0});
    if (it == staged_.end() || (entry.weight < 0.0f && !SHOAL_MUTANT(late_counts))) continue;
    for (const Part& part : it->second.parts) {
      const float divisor = staleness_divisor(part.by_staleness, part.version_read, version);
      tables[part.table].emplace_back(&part, entry.weight / divisor);
    }
  }
  sums_.clear();
  for (const auto& [table, parts] : tables) sums_.push_back(merge(parts));
  summed_ = commit.seq;
  return sums_;
}

void Staging::finish(const Commit& commit, uint64_t version, Staleness& staleness) {
  sums_.clear();
  summed_ = 0;
  for (const CommitEntry& entry : commit.entries) {
    const auto taken = staged_.find({entry.rank, entry.step, entry.client, entry.incarnation});
    if (taken != staged_.end() && entry.weight > 0.0f)
      staleness.note(taken->second.parts[0].version_read, version);
    auto it = staged_.lower_bound({entry.rank, 0, 0, 0});
    while (it != staged_.end() && std::get<0>(it->first) == entry.rank &&
           std::get<1>(it->first) <= entry.step) {
      it = erase(it);
    }
  }
}

Staging::Staged::iterator Staging::erase(Staged::iterator at) {
  bytes_ -= at->second.bytes;
  budget_->used -= at->second.bytes;
  return staged_.erase(at);
}

void Staging::drop_unfinished(std::span<const uint64_t> clocks) {
  for (auto it = staged_.begin(); it != staged_.end();) {
    const auto& [rank, step, client, incarnation] = it->first;
    it = rank < clocks.size() && step < clocks[rank] ? std::next(it) : erase(it);
  }
}

void Staging::clear() {
  budget_->used -= bytes_;
  bytes_ = 0;
  summed_ = 0;
  sums_.clear();
  staged_.clear();
}

void Staging::encode(std::vector<std::byte>& out) const {
  const uint64_t contributions = staged_.size();
  pack(out, &contributions, 1);
  for (const auto& [name, contribution] : staged_) {
    const auto& [rank, step, client, incarnation] = name;
    const uint64_t head[] = {rank, step, client, incarnation, contribution.parts.size()};
    pack(out, head, 5);
    for (const Part& part : contribution.parts) {
      const uint32_t about[] = {part.table, part.stride};
      const uint64_t numbers[] = {part.version_read, part.by_staleness, part.keys.size()};
      const size_t keys = part.keys.size();
      pack(out, about, 2);
      pack(out, &part.lr, 1);
      pack(out, numbers, 3);
      pack(out, part.keys.data(), keys);
      pack(out, part.rows.get(), keys * part.stride);
    }
  }
}

bool Staging::decode(std::span<const std::byte>& in, const FindSpec& find) {
  clear();
  const bool whole = decode_all(in, find);
  if (!whole) clear();  // a contribution that was cut short is none
  return whole;
}

bool Staging::decode_all(std::span<const std::byte>& in, const FindSpec& find) {
  uint64_t contributions = 0;
  if (!unpack(in, contributions)) return false;
  for (uint64_t i = 0; i < contributions; ++i) {
    std::array<uint64_t, 5> head{};
    if (!unpack(in, head) || head[4] == 0) return false;
    Contribution& contribution =
        staged_[{static_cast<uint32_t>(head[0]), head[1], head[2], static_cast<uint32_t>(head[3])}];
    for (uint64_t n = 0; n < head[4]; ++n) {
      Part part;
      std::array<uint64_t, 3> numbers{};
      std::vector<float> rows;
      if (!unpack(in, part.table) || !unpack(in, part.stride) || !unpack(in, part.lr)) return false;
      const TableSpec* spec = find(part.table);
      if (spec == nullptr || part.stride != spec->floats(0) || !unpack(in, numbers) ||
          !unpack(in, part.keys, numbers[2]) || !unpack(in, rows, part.keys.size() * part.stride)) {
        return false;
      }
      const auto exists = [&](int64_t key) { return !spec->dense || spec->has_piece(key); };
      if (!std::all_of(part.keys.begin(), part.keys.end(), exists)) return false;
      const uint64_t keys = numbers[2];
      part.version_read = numbers[0];
      part.by_staleness = numbers[1] != 0;
      part.rows = std::make_unique_for_overwrite<float[]>(rows.size());
      std::copy(rows.begin(), rows.end(), part.rows.get());
      const uint64_t bytes = keys * (8 + uint64_t{4} * part.stride);
      contribution.bytes += bytes;
      bytes_ += bytes;
      budget_->used += bytes;
      contribution.parts.push_back(std::move(part));
    }
  }
  return true;
}

}  // namespace shoal
