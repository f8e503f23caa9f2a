// One logical part of the store: the unit of ownership, and later of replication, migration and
// checkpointing. A state machine without I/O: it is given requests and gives answers. The embedded
// store, the server and the simulator all call this same code.
//
// Thread-safe: every public method takes the shard's mutex (pulls share it); nothing under it does I/O or
// takes another.
// Invariants:
//   - `version` counts applied pushes; a row keeps the version of its last write.
//   - A push's update and its dedupe record are one critical section.
//   - Hyper-parameters change between two entries of the log, and travel with the second: a copy makes each
//     update with those that its head made it with, whenever it hears of newer ones.
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
#include "store/image.h"
#include "store/push_part.h"
#include "store/staging.h"
#include "store/table_rows.h"

namespace shoal {

struct PullPart {
  uint32_t table = 0;
  uint32_t term = 0;
  bool any_copy = false;  // also where not all that is here has been acknowledged
  std::span<const int64_t> keys = {};
};

inline constexpr uint32_t kNobody = UINT32_MAX;

// A server's place in the chain of a shard, as the placement of that term says. The head orders what clients
// push, and each server sends what it has applied on to the next.
struct ChainPlace {
  uint32_t term = 1;
  bool head = true;   // takes pushes of clients
  bool reads = true;  // answers their pulls
  uint32_t next = kNobody;
  bool member = true;  // of the chain at all
};

// Tables whose hyper-parameters have changed.
using Settings = std::vector<std::shared_ptr<const TableSpec>>;

struct Ack {
  Status status;
  uint32_t term = 0;
  uint64_t version = 0;
  bool duplicate = false;
  uint64_t entry = 0;      // of the log: its own, or the last one where it is a duplicate
  Settings settings = {};  // that the update was the first to be made with
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

// What a shard costs its server: memory, and floats that were read and written since it began.
struct ShardLoad {
  uint64_t bytes = 0;
  uint64_t floats = 0;
};

// What a push of such a table must be, before any shard is touched. `staged`: it waits for a commit.
Status check_part(const TableSpec& spec, const PushPart& part, bool staged);

class Shard {
 public:
  explicit Shard(uint32_t number, std::shared_ptr<StagedBudget> budget = std::make_shared<StagedBudget>())
      : number_(number), staging_(std::move(budget)) {}

  // Makes a table known. Other hyper-parameters than before: the head makes its next update with them, a copy
  // waits for that entry of the log.
  Status declare(const std::shared_ptr<const TableSpec>& spec);

  // Refuses what a server sends that has not learnt this placement.
  Status check_sender(uint32_t term);
  // Refuses a pull that was made for another placement.
  Status check_pull(uint32_t term, bool any_copy);
  uint32_t term();
  // Ok where the log has come to this entry, `unavailable` where it has not yet.
  Ack reached(uint64_t entry);
  // Nothing is taken from clients until it is placed.
  void unplace();
  // A new placement; an older one than is known changes nothing. True: this server has left the chain.
  bool place(const ChainPlace& place);

  // Pushes, staged ones and commits are the entries of the shard's log. The head numbers them; a replica is
  // given `entry`, says that one is a duplicate which it has, and `unavailable` to one that comes too early.

  // Applies all parts as one update, or as more of the last one of the same client. `identity` null: no
  // retries are possible (the embedded store).
  Ack push(const PushIdentity* identity, std::span<const PushPart> parts, uint64_t step, uint64_t entry = 0,
           bool more = false, const Settings& settings = {});

  // Keeps all parts for the commit that will name (rank, step); the dedupe record is written with them.
  Ack stage(const PushIdentity* identity, std::span<const PushPart> parts, uint32_t rank, uint64_t step,
            uint64_t entry = 0);
  // Sums what the commit names, in its order, and steps each key once; the next one in turn, or a duplicate.
  Ack commit(const Commit& commit, uint32_t term = 0, uint64_t entry = 0, const Settings& settings = {});
  // The squared norm of this shard's part of the commit's sum; NaN for a commit done before the last one.
  double norm(const Commit& commit);

  // Writes the rows to `target`, which has room for all of them.
  Ack pull(const PullPart& part, const PullTarget& target);

  Result<ScanPage> scan(uint32_t table, uint64_t cursor, size_t rows_max);
  Result<TableFigures> figures(uint32_t table);
  Staleness staleness();
  ShardLoad load();

  // An image of this shard as it is now: gives its version and what goes with the rows (dedupe records,
  // staged pushes). Another one that was being read is over.
  struct ImageHead {
    uint64_t id = 0;
    uint64_t entry = 0;  // the last of the log that it holds
    std::vector<std::byte> bytes;
    Settings
        settings;  // of all tables. Not in `bytes`: who goes on from a checkpoint has settings of its own
  };
  ImageHead begin_image();
  // The next page, of about so many bytes; an empty one when all was read.
  Result<ImagePage> read_image(uint64_t id, size_t bytes_max);
  void end_image(uint64_t id);
  // Becomes what the image was of, all tables being declared and `clear` called: `begin_image`'s bytes and
  // every page.
  Status restore(std::span<const std::byte> head);
  Status restore(const ImagePage& page);
  // Goes on with the hyper-parameters of the server that it is a copy of.
  Status restore(const Settings& settings);
  // Forgets all rows, for the pages of an image that is taken over without its head.
  void clear();
  // Of a shard that is held elsewhere: commits up to this one are none of its business.
  void skip_commits(uint64_t seq);
  // Restored from an older image than the other shards, which went on: nothing is staged, and commits that it
  // has missed (some worker carried them to a server that is gone) are not waited for.
  void rejoin();
  // What it held when it became the head of this term.
  struct Began {
    uint32_t term = 0;
    uint64_t version = 0;
    uint64_t entry = 0;  // the last of the log
  };
  Began began();
  // Forgets what the worker of each rank staged for steps that it has not finished.
  void drop_unfinished(std::span<const uint64_t> clocks);

  void fence(uint64_t client, uint32_t incarnation);
  void forget(uint64_t client, uint32_t incarnation);
  uint32_t incarnation(uint64_t client);  // the newest that was heard of; 0: none

 private:
  struct Entry {
    std::variant<TableRows, DensePieces> rows;
    std::shared_ptr<const TableSpec> newest;  // that was declared; updates are made with `spec()`
    bool told = false;                        // `spec()` went with an update since this server is the head
    uint64_t pushes = 0;
    uint64_t pulls = 0;

    const TableSpec& spec() const {
      return std::visit([](const auto& one) -> const TableSpec& { return one.spec(); }, rows);
    }
  };

  Ack begin(uint32_t term, uint64_t entry);
  Status readable(uint32_t term, bool any_copy) const;
  Ack logged(Ack ack);
  bool is_fresh(const PushIdentity& identity, Ack& ack) const;
  Status check(const PushPart& part, bool staged);
  Status check(const Settings& settings);
  void adopt(const Settings& settings);
  void made_with(const Settings& settings);
  void tell_settings();  // with the next update of each table
  // The newest hyper-parameters of the tables, of `{.table = ...}`s, where others were used so far, or the
  // copies may have others: they heard of a table at another moment, or of an update that this one never
  // made.
  template <typename Parts>
  Settings changed(const Parts& parts);
  bool prepare(const PushPart& part);
  bool apply(const PushPart& part, uint64_t version, uint64_t step, bool last);
  void note_norm(const Commit& commit, std::span<const Staging::Sum> sums);
  void apply(const Staging::Sum& sum, uint64_t step);
  Entry* find(uint32_t table);
  Status unknown(uint32_t table) const;
  Status out_of_memory() const;

  const uint32_t number_;

  FairSharedMutex mutex_;
  // Guarded by mutex_:
  ChainPlace place_;
  uint64_t entries_ = 0;  // of the log
  uint64_t version_ = 0;
  Dedupe dedupe_;
  Staging staging_;
  Staleness staleness_;
  uint64_t committed_ = 0;  // seq of the last commit
  bool rejoined_ = false;   // some before it were missed
  Began began_;
  uint64_t normed_ = 0;  // the commit that norm_ is of
  double norm_ = 0.0;
  std::unordered_map<uint32_t, Entry> tables_;
  uint64_t floats_moved_ = 0;
  std::vector<uint32_t> imaged_;  // tables whose image is not read to its end
  uint64_t image_ = 0;            // id of the last one
};

}  // namespace shoal
