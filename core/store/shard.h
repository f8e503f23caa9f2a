// One logical part of the store: the unit of ownership, and later of replication, migration and
// checkpointing. A state machine without I/O: it is given requests and gives answers. The embedded
// store, the server and the simulator all call this same code.
//
// Thread-safe: every public method takes the shard's mutex (pulls share it); nothing under it does I/O or
// takes another.
// Invariants:
//   - `version` counts applied pushes; a row keeps the version of its last write.
//   - A push's update and its dedupe record are one critical section.
//   - A push is checked wholly before anything of it is applied; a refusal changes nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <variant>

#include "base/fair_shared_mutex.h"
#include "base/status.h"
#include "store/dedupe.h"
#include "store/dense_pieces.h"
#include "store/table_rows.h"

namespace shoal {

enum class PushMode : uint8_t { update = 0, assign = 1, init_once = 2 };

// The rows of one table within a push to one shard. For a dense tensor keys are piece numbers.
struct PushPart {
  uint32_t table = 0;
  uint32_t term = 0;
  PushMode mode = PushMode::update;
  Codec codec = Codec::fp32;
  float lr = 0.0f;  // NaN: the table's own
  std::span<const int64_t> keys = {};
  std::span<const std::byte> values = {};  // one encoded row per key
};

struct PullPart {
  uint32_t table = 0;
  uint32_t term = 0;
  std::span<const int64_t> keys = {};
};

struct Ack {
  Status status;
  uint32_t term = 0;
  uint64_t version = 0;
  bool duplicate = false;
};

struct TableFigures {
  uint64_t rows = 0;
  uint64_t value_bytes = 0;
  uint64_t state_bytes = 0;
  uint64_t memory_bytes = 0;
  uint64_t pushes = 0;
  uint64_t pulls = 0;

  TableFigures& operator+=(const TableFigures& other);
};

class Shard {
 public:
  explicit Shard(uint32_t number) : number_(number) {}

  // Makes a table known, or brings its hyper-parameters up to date.
  Status declare(const std::shared_ptr<const TableSpec>& spec);

  // Refuses a request that was made for another term's placement.
  Status check_term(uint32_t term) const;

  // Applies all parts as one update. `identity` null: no retries are possible (the embedded store).
  Ack push(const PushIdentity* identity, std::span<const PushPart> parts, uint64_t step);

  // Writes the rows to `target`, which has room for all of them.
  Ack pull(const PullPart& part, const PullTarget& target);

  Result<ScanPage> scan(uint32_t table, uint64_t cursor, size_t rows_max);
  Result<TableFigures> figures(uint32_t table);
  void fence(uint64_t client, uint32_t incarnation);
  void forget(uint64_t client, uint32_t incarnation);

 private:
  struct Entry {
    std::variant<TableRows, DensePieces> rows;
    uint64_t pushes = 0;
    uint64_t pulls = 0;
  };

  Status check(const PushPart& part);
  bool prepare(const PushPart& part, bool only_part);
  bool apply(const PushPart& part, uint64_t version, uint64_t step);
  Entry* find(uint32_t table);
  Status unknown(uint32_t table) const;

  const uint32_t number_;
  std::atomic<uint32_t> term_{1};

  FairSharedMutex mutex_;
  // Guarded by mutex_:
  uint64_t version_ = 0;
  Dedupe dedupe_;
  std::unordered_map<uint32_t, Entry> tables_;
};

}  // namespace shoal
