#include "store/store.h"

#include <algorithm>
#include <cassert>
#include <mutex>
#include <numeric>

namespace shoal {
namespace {

constexpr size_t kHelpBytes = 512 * 1024;  // below, a commit is over before a helper is awake

}  // namespace

uint32_t shard_of_key(const TableSpec& spec, int64_t key, uint32_t shards) {
  if (spec.dense) {
    const uint64_t first = hash_name(spec.name) % shards;
    return static_cast<uint32_t>((first + static_cast<uint64_t>(key)) % shards);
  }
  if (spec.range_low < spec.range_high) {
    if (key < spec.range_low) return 0;
    if (key >= spec.range_high) return shards - 1;
    const auto width = static_cast<uint64_t>(spec.range_high) - static_cast<uint64_t>(spec.range_low);
    const auto offset = static_cast<uint64_t>(key) - static_cast<uint64_t>(spec.range_low);
    __extension__ using uint128 = unsigned __int128;
    return static_cast<uint32_t>((uint128{offset} * shards) / width);
  }
  return shard_of_hash(mix64(static_cast<uint64_t>(key)), shards);
}

StoreFigures& StoreFigures::operator+=(const StoreFigures& other) {
  staged_bytes += other.staged_bytes;
  staleness.count += other.staleness.count;
  staleness.sum += other.staleness.sum;
  staleness.max = std::max(staleness.max, other.staleness.max);
  return *this;
}

Store::Store(uint32_t shards) {
  assert(shards >= 1 && shards <= kShardsMax);
  shards_.reserve(shards);
  for (uint32_t i = 0; i < shards; ++i) shards_.push_back(std::make_unique<Shard>(i, budget_));
}

Status Store::declare(TableSpec spec) {
  if (Status status = check_table(spec); !status.ok()) return status;
  spec.init.salt = mix64(spec.seed ^ hash_name(spec.name));
  const auto shared = std::make_shared<const TableSpec>(std::move(spec));
  const std::lock_guard declaring(declaring_);
  const auto known = table(shared->id);
  if (known != nullptr && !same_table(*known, *shared))
    return {Code::mismatch, describe(*known) + " exists; it cannot be opened as " + describe(*shared)};
  if (known != nullptr && shared->generation <= known->generation) return {};
  if (known == nullptr && tables_.size() >= kTablesMax)
    return {Code::bad_input, "a store holds at most " + std::to_string(kTablesMax) + " tables"};
  // Shards first: whoever finds a table may rely on every shard knowing it.
  for (const auto& shard : shards_)
    if (Status status = shard->declare(shared); !status.ok()) return status;
  const std::unique_lock lock(mutex_);
  tables_[shared->id] = shared;
  return {};
}

std::shared_ptr<const TableSpec> Store::table(uint32_t id) const {
  const std::shared_lock lock(mutex_);
  const auto it = tables_.find(id);
  return it == tables_.end() ? nullptr : it->second;
}

// Workers carry the same commit at the same time: each goes through all shards, so whoever is through knows
// that all are done.
Status Store::commit(const Commit& commit, WorkCrew& crew, std::vector<Ack>& acks, bool anew) {
  uint64_t placings = 0;
  {
    const std::lock_guard lock(commits_mutex_);
    if (!anew && commit.seq <= committed_) return {};
    placings = placings_;
  }
  acks.resize(shards_.size());
  crew.run(acks.size(), [&](size_t i) { acks[i] = shards_[i]->commit(commit); }, budget_->used < kHelpBytes);
  for (const Ack& ack : acks)
    if (!ack.status.ok() && ack.status.code() != Code::moved) return ack.status;
  const std::lock_guard lock(commits_mutex_);
  // A shard that has come since was passed over.
  if (placings == placings_) committed_ = std::max(committed_, commit.seq);
  return {};
}

void Store::placed() {
  const std::lock_guard lock(commits_mutex_);
  ++placings_;
  committed_ = 0;
}

std::vector<std::shared_ptr<const TableSpec>> Store::tables() const {
  const std::shared_lock lock(mutex_);
  std::vector<std::shared_ptr<const TableSpec>> all;
  for (const auto& [id, spec] : tables_) all.push_back(spec);
  return all;
}

Result<TableFigures> Store::figures(uint32_t table) {
  TableFigures sum;
  for (const auto& shard : shards_) {
    const Result<TableFigures> one = shard->figures(table);
    if (!one.ok()) return one.status();
    sum += *one;
  }
  return sum;
}

StoreFigures Store::figures() {
  StoreFigures sum{.staged_bytes = budget_->used};
  for (const auto& shard : shards_) sum += {.staleness = shard->staleness()};
  return sum;
}

double Store::norm(const Commit& commit, WorkCrew& crew) {
  std::vector<double> norms(shards_.size());
  crew.run(norms.size(), [&](size_t i) { norms[i] = shards_[i]->norm(commit); }, budget_->used < kHelpBytes);
  return std::accumulate(norms.begin(), norms.end(), 0.0);
}

void Store::fence(uint64_t client, uint32_t incarnation) {
  for (const auto& shard : shards_) shard->fence(client, incarnation);
}

void Store::forget(uint64_t client, uint32_t incarnation) {
  for (const auto& shard : shards_) shard->forget(client, incarnation);
}

uint32_t Store::incarnation(uint64_t client) {
  uint32_t newest = 0;
  for (const auto& shard : shards_) newest = std::max(newest, shard->incarnation(client));
  return newest;
}

}  // namespace shoal
