// What a user of the store can ask for, whatever lies behind it: an embedded store or servers.
//
// Thread-safe. Keys, gradients and values are read during the call only; pulled rows are written until
// the operation is done. Every wait has a deadline, and its error says who was waited for.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "net/shm.h"
#include "serve/acknowledged.h"
#include "serve/client_machine.h"
#include "serve/link.h"
#include "serve/placement.h"
#include "store/store.h"
#include "store/sync_message.h"

namespace shoal {

using Deadline = std::chrono::steady_clock::time_point;

// An operation as callers see it. Pulls keep their rows in `block`, or in the caller's own memory.
class ClientOperation : public Operation {
 public:
  std::shared_ptr<const TableSpec> spec;
  const Deadline begun = std::chrono::steady_clock::now();
  std::string what;              // "pull from table 'items'", for messages
  std::shared_ptr<Block> block;  // null where the caller gave the memory
  float* out = nullptr;          // first row
  size_t rows = 0;
  size_t row_floats = 0;
  std::vector<std::shared_ptr<ClientOperation>> pulls;  // of several tables: one each, in order
  std::shared_ptr<void> keep;  // whatever must outlive the operation, such as the owner of `out`
  bool sealed = false;         // nothing is added by its caller any more; under the client's mutex
};

// A question to the sync shard.
class SyncOperation : public ClientOperation {
 public:
  SyncRequest request;
  SyncReply reply;

  Status on_reply(const Request& request, const FrameView& frame) override;
};

// The caller's memory for pulled rows, and what keeps it alive. Without data: the operation's own.
struct OutMemory {
  std::span<float> floats = {};
  std::shared_ptr<void> owner = nullptr;
};

struct PushOptions {
  PushMode mode = PushMode::update;
  Codec codec = Codec::fp32;
  uint64_t step = 0;
  int64_t stage_rank = -1;  // >= 0: kept for the commit that names (stage_rank, step)

  bool by_staleness = false;  // lr is divided by the updates since this client's last pull, this one included

  Codec wire() const { return mode == PushMode::update ? codec : Codec::fp32; }
};

// What is pushed to one table or tensor.
struct PushItem {
  uint32_t table = 0;
  bool is_tensor = false;
  std::span<const int64_t> keys = {};
  std::span<const float> values = {};
  float lr = 0.0f;                     // NaN: the table's own
  std::span<const float> pulled = {};  // tensors: what the gradient was made from, where lambda is not 0
  float dc_lambda = 0.0f;
  std::shared_ptr<const TableSpec> spec = nullptr;  // filled in by the client

  bool is_empty() const { return !is_tensor && keys.empty(); }
};

struct PullItem {
  uint32_t table = 0;
  std::optional<std::span<const int64_t>> keys = {};  // none: a tensor
  OutMemory out = {};
};

struct ClientCounters {
  std::vector<std::string> lanes;  // by server
  uint64_t pulls = 0, pushes = 0, requests = 0, retries = 0, reconnects = 0;
  uint64_t bytes_sent = 0, bytes_received = 0, shared_bytes = 0;
  uint64_t reads_behind = 0, versions_behind_max = 0;  // see Acknowledged
  // By server: for how long the oldest request has had no answer, 0 without one. Questions whose answer waits
  // for other workers do not count.
  std::vector<double> waits_s = {};
};

class PullOperation;
class Chain;
class SyncDesk;

// A store in this process, with its sync shard.
struct LocalStore {
  Store* store = nullptr;
  SyncDesk* sync = nullptr;
  Chain* chain = nullptr;  // a server's
};

class StoreClient {
 public:
  using OperationPtr = std::shared_ptr<ClientOperation>;

  virtual ~StoreClient() = default;

  virtual Status declare(const TableSpec& spec, Deadline deadline) = 0;

  // Rows of the keys, in their order; several items are one operation with one request per server, and its
  // `pulls` have the rows. `out` without data: into memory of the operation's own.
  Result<OperationPtr> pull(std::span<const PullItem> items, Codec codec, Deadline deadline);
  // `values` holds a row for each key. One operation under one seq, however many items. Refused wholly,
  // before anything is sent, when a value is not finite or (whatever the lane, so that a program tested in
  // memory runs on servers) not so in the wire format.
  Result<OperationPtr> push(std::vector<PushItem> items, const PushOptions& options, Deadline deadline);

  // Asks the sync shard; the operation is done when it has answered, which may take other workers' steps.
  Result<std::shared_ptr<SyncOperation>> sync(SyncRequest request, Deadline deadline);
  // Takes the commits that came with an answer to every server, and gives the norm of the last one's sum
  // (0 where it is not clipped). A commit is applied once, whoever else carries it.
  Result<double> carry(const SyncReply& reply, Deadline deadline);
  // What to say of a question that was not answered in time: who is waited for, since when.
  Status late_sync(const SyncOperation& operation);
  virtual Result<StoreFigures> store_figures(Deadline deadline) = 0;
  // Another client of the same store, for a thread that is a worker of its own. Embedded stores only.
  virtual Result<std::unique_ptr<StoreClient>> fork();
  // For a cut: keeps new pushes and commits back, and waits until those in flight are acknowledged everywhere
  // and no step is half pushed. False: not by the deadline, and nothing is kept back.
  virtual bool hold(Deadline deadline) = 0;
  virtual void release() = 0;
  // What images are made of, as long as the client lives; nothing where servers hold it.
  virtual LocalStore local() { return {}; }

  virtual Result<TableFigures> figures(uint32_t table, Deadline deadline) = 0;
  virtual Result<ScanPage> scan(uint32_t table, uint32_t shard, uint64_t cursor, size_t rows_max,
                                Deadline deadline) = 0;

  // Waits until the operation is done and gives its status; timeout where the deadline comes first (the
  // operation goes on, and may be waited for again).
  virtual Status wait(const OperationPtr& operation, Deadline deadline) = 0;
  // The caller will not wait at once: somebody else must see to it that the operation proceeds.
  virtual void leave(const OperationPtr& operation) = 0;

  // Shards have moved, or servers have come or gone. An older placement than is known changes nothing.
  virtual void set_placement(Placement) {}
  // What was acknowledged to this client and is not in what the shard began its term with; told once.
  virtual Loss taken_over(uint16_t /*shard*/, const Shard::Began& /*began*/) { return {}; }
  // See WorkCrew; embedded stores only.
  virtual bool borrow_openmp(const std::string&) { return false; }

  virtual ClientCounters counters() = 0;
  virtual uint32_t shards() const = 0;
  virtual void close() = 0;  // fails what is open; idempotent

 protected:
  using SpecPtr = std::shared_ptr<const TableSpec>;

  static Status closed_status() { return {Code::closed, "this client was closed"}; }
  Result<SpecPtr> find(uint32_t table, bool dense);
  // A pull's part of an operation; `keys` of a tensor are the numbers of all its pieces.
  struct Pull {
    std::shared_ptr<PullOperation> operation;
    std::vector<int64_t> pieces;
    std::span<const int64_t> keys;
  };

 private:
  // What stands behind the checks that all clients share.
  virtual Result<SpecPtr> lookup(uint32_t table) = 0;  // null: not declared
  virtual Status send_sync(const std::shared_ptr<SyncOperation>& operation, Deadline deadline) = 0;
  virtual Status commit(const Commit& commit, Deadline deadline) = 0;  // on every server
  virtual Result<double> norm(const Commit& commit, Deadline deadline) = 0;
  virtual std::shared_ptr<Block> allocate_rows(size_t bytes) = 0;
  virtual Result<OperationPtr> send_pull(const OperationPtr& whole, std::span<const Pull> pulls,
                                         Deadline deadline) = 0;
  // There is something to push. `sums_are_safe`: no sum of duplicates can overflow in the wire format.
  virtual Result<OperationPtr> send_push(const OperationPtr& operation, std::span<const PushItem> items,
                                         const PushOptions& options, bool sums_are_safe,
                                         Deadline deadline) = 0;

  Result<Pull> make_pull(const PullItem& item, Codec codec);
  Status check_item(const PushItem& item, const PushOptions& options, bool& sums_are_safe) const;

  std::atomic<uint64_t> applied_{0};  // commits up to here are done on every server
};

struct RemoteOptions {
  ClientIdentity identity;
  Placement placement;
  std::optional<Lane> lane;  // none: the best that works
  size_t shm_bytes_max = size_t{1} << 30;
  std::vector<CoordinatorAddress> coordinators =
      {};  // where its pulse goes: to the one that leads; none: nowhere
};

// A store within this process. `threads` 0: one per core, at most 8.
std::unique_ptr<StoreClient> make_embedded_client(uint32_t shards, size_t threads);
// Connects to every server; an error names the one that did not answer by the deadline.
Result<std::unique_ptr<StoreClient>> connect_remote(RemoteOptions options, Deadline deadline);

// Nothing may be pushed that is not finite, also after its encoding and after the sum
// of its duplicates.
struct FiniteCheck {
  Status status;
  bool sums_are_safe = true;  // no sum of these values can overflow in the codec
};
FiniteCheck check_finite(const std::string& what, std::span<const int64_t> keys, const float* values,
                         size_t row_floats, Codec codec);

}  // namespace shoal
