// All shards of one process, and the tables that they know. The embedded store is this and nothing else;
// a server is this behind sockets.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "base/work_crew.h"
#include "store/shard.h"

namespace shoal {

inline constexpr uint32_t kShardsMax = 4096;
inline constexpr uint32_t kTablesMax = 65536;

// The shard of a key: fixed for the life of a store, whatever servers come and go.
inline uint32_t shard_of_hash(uint64_t hash, uint32_t shards) {
  return fast_range(static_cast<uint32_t>(hash >> 32), shards);
}
uint32_t shard_of_key(const TableSpec& spec, int64_t key, uint32_t shards);

// What is counted over all shards, whatever the table.
struct StoreFigures {
  uint64_t staged_bytes = 0;
  Staleness staleness = {};

  StoreFigures& operator+=(const StoreFigures& other);
};

class Store {
 public:
  explicit Store(uint32_t shards);

  uint32_t shards() const { return static_cast<uint32_t>(shards_.size()); }
  Shard& shard(uint32_t number) { return *shards_[number]; }

  // Makes a table known to every shard; a second time brings its hyper-parameters up to date.
  Status declare(TableSpec spec);
  std::shared_ptr<const TableSpec> table(uint32_t id) const;  // null: not declared
  std::vector<std::shared_ptr<const TableSpec>> tables() const;
  // Applies a commit on every shard that is headed here; `acks` are their answers, by shard. A commit that is
  // done already costs nothing and has no answers, unless they are asked for `anew`.
  Status commit(const Commit& commit, WorkCrew& crew, std::vector<Ack>& acks, bool anew = false);
  // Over the shards that are headed here, in their order; NaN for a commit that was done before the last one.
  double norm(const Commit& commit, WorkCrew& crew);
  StoreFigures figures();
  Result<TableFigures> figures(uint32_t table);
  // New places of the shards in their chains: commits are looked at anew.
  void placed();

  void fence(uint64_t client, uint32_t incarnation);
  // The client has ended in good order and nothing of it is under way: its dedupe records go, its fence
  // stays.
  void forget(uint64_t client, uint32_t incarnation);
  // The newest that any shard has heard of; 0: none.
  uint32_t incarnation(uint64_t client);

 private:
  const std::shared_ptr<StagedBudget> budget_ = std::make_shared<StagedBudget>();
  std::vector<std::unique_ptr<Shard>> shards_;
  std::mutex declaring_;  // one table after the other; taken before mutex_, and held while shards wait
  std::mutex commits_mutex_;
  uint64_t committed_ = 0;  // guarded by commits_mutex_: done on every shard up to here, since the last of
  uint64_t placings_ = 0;   // so many calls of `placed`
  mutable std::shared_mutex mutex_;
  // Guarded by mutex_; written under both.
  std::unordered_map<uint32_t, std::shared_ptr<const TableSpec>> tables_;
};

}  // namespace shoal
