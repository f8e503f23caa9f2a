// The store within this process: the same shards and kernels as a server's, called directly.
#include <algorithm>
#include <atomic>
#include <cassert>
#include <condition_variable>
#include <functional>
#include <mutex>

#include "base/copy.h"
#include "base/grow_array.h"
#include "base/pool.h"
#include "base/work_crew.h"
#include "serve/request_builder.h"
#include "serve/split.h"
#include "serve/store_client.h"
#include "serve/sync_desk.h"

namespace shoal {
namespace {

constexpr size_t kHelpRows = 2048;  // below this a call is over before a helper is awake
constexpr size_t kWarmBytes = size_t{1} << 30;
constexpr size_t kMergedKept = 16;

Status out_of_memory() { return {Code::internal, "out of memory for a push"}; }

// What forked clients have in common.
struct SharedStore {
  SharedStore(uint32_t shards, size_t threads) : store(shards), crew(threads - 1) {}

  Store store;
  WorkCrew crew;
  SyncDesk sync;
  std::mutex mutex;                  // guards answers of the sync shard until they are done
  std::condition_variable answered;  // a sync operation is done, or a client closed

  // Who writes, for cuts. Guarded by gate:
  std::mutex gate;
  std::condition_variable gate_changed;
  bool held = false;
  size_t writing = 0;     // pushes and commits under way
  size_t half_steps = 0;  // clients that have pushed of a step whose end they have not told
};

class EmbeddedClient : public StoreClient {
 public:
  explicit EmbeddedClient(std::shared_ptr<SharedStore> shared)
      : shared_(std::move(shared)),
        store_(shared_->store),
        crew_(shared_->crew),
        arena_(make_heap_arena(kWarmBytes)),
        versions_(store_.shards()) {
    for (auto& version : versions_) version = kNoVersion;
  }

  Result<std::unique_ptr<StoreClient>> fork() override {
    if (closed_) return closed_status();
    return std::unique_ptr<StoreClient>(std::make_unique<EmbeddedClient>(shared_));
  }

  LocalStore local() override { return {&store_, &shared_->sync}; }

  Result<StoreFigures> store_figures(Deadline) override { return store_.figures(); }

  Status declare(const TableSpec& spec, Deadline) override {
    return closed_ ? closed_status() : store_.declare(spec);
  }

  Result<TableFigures> figures(uint32_t table, Deadline) override { return store_.figures(table); }

  Result<ScanPage> scan(uint32_t table, uint32_t shard, uint64_t cursor, size_t rows_max, Deadline) override {
    return closed_ ? Result<ScanPage>(closed_status()) : store_.shard(shard).scan(table, cursor, rows_max);
  }

  Status wait(const OperationPtr& operation, Deadline deadline) override {
    if (operation->done()) return operation->status();
    std::unique_lock lock(shared_->mutex);
    shared_->answered.wait_until(lock, deadline, [&] { return operation->done() || closed_; });
    if (operation->done()) return operation->status();
    return closed_ ? closed_status() : Status{Code::timeout, operation->what + " was not answered in time"};
  }
  void leave(const OperationPtr&) override {}
  bool borrow_openmp(const std::string& path) override { return crew_.borrow_openmp(path); }
  ClientCounters counters() override { return {.lanes = {"memory"}, .pulls = pulls_, .pushes = pushes_}; }
  uint32_t shards() const override { return store_.shards(); }
  void close() override {
    note_step(SyncVerb::leave);
    const std::lock_guard lock(shared_->mutex);
    closed_ = true;
    shared_->answered.notify_all();
  }

 private:
  Result<SpecPtr> lookup(uint32_t table) override {
    return closed_ ? Result<SpecPtr>(closed_status()) : store_.table(table);
  }

  // While it lives, a push or commit is under way; none begins while a cut is made, but within a step.
  class Writing {
   public:
    Writing(EmbeddedClient& client, bool of_a_step, Deadline deadline) : shared_(*client.shared_) {
      std::unique_lock lock(shared_.gate);
      begun_ =
          shared_.gate_changed.wait_until(lock, deadline, [&] { return !shared_.held || client.half_step_; });
      if (!begun_) return;
      ++shared_.writing;
      if (of_a_step && client.in_job_ && !std::exchange(client.half_step_, true)) ++shared_.half_steps;
    }
    ~Writing() {
      const std::lock_guard lock(shared_.gate);
      shared_.writing -= begun_ ? 1 : 0;
      if (shared_.held) shared_.gate_changed.notify_all();
    }
    Status status() const {
      return begun_ ? Status{} : Status{Code::timeout, "pushes are held for a checkpoint"};
    }

   private:
    SharedStore& shared_;
    bool begun_ = false;
  };

  bool hold(Deadline deadline) override {
    std::unique_lock lock(shared_->gate);
    if (!shared_->gate_changed.wait_until(lock, deadline, [&] { return !shared_->held; })) return false;
    shared_->held = true;
    const bool still = shared_->gate_changed.wait_until(
        lock, deadline, [&] { return shared_->writing == 0 && shared_->half_steps == 0; });
    if (!still) shared_->held = false;
    shared_->gate_changed.notify_all();
    return still;
  }
  void release() override {
    const std::lock_guard lock(shared_->gate);
    shared_->held = false;
    shared_->gate_changed.notify_all();
  }

  void note_step(SyncVerb verb) {
    if (verb != SyncVerb::open && verb != SyncVerb::advance && verb != SyncVerb::leave) return;
    const std::lock_guard lock(shared_->gate);
    in_job_ = verb != SyncVerb::leave;
    shared_->half_steps -= std::exchange(half_step_, false) ? 1 : 0;
    if (shared_->held) shared_->gate_changed.notify_all();
  }

  Status send_sync(const std::shared_ptr<SyncOperation>& operation, Deadline) override {
    if (closed_) return closed_status();
    const auto handled =
        shared_->sync.ask(operation->request, [operation, shared = shared_.get()](const SyncReply& reply) {
          const std::lock_guard lock(shared->mutex);
          operation->reply = reply;
          operation->finish(reply.status);
          shared->answered.notify_all();
        });
    handled.deliver(true);
    note_step(operation->request.verb);
    return {};
  }
  Status commit(const Commit& commit, Deadline deadline) override {
    const Writing writing(*this, false, deadline);
    std::vector<Ack> acks;
    return writing.status().ok() ? store_.commit(commit, crew_, acks) : writing.status();
  }
  Result<double> norm(const Commit& commit, Deadline) override { return store_.norm(commit, crew_); }

  std::shared_ptr<Block> allocate_rows(size_t bytes) override { return arena_->allocate(bytes); }

  Result<OperationPtr> send_pull(const OperationPtr& whole, std::span<const Pull> pulls, Deadline) override {
    ++pulls_;
    for (const Pull& pull : pulls) {
      if (Status status = pull_one(*pull.operation, pull.keys); !status.ok()) return status;
      pull.operation->finish({});
    }
    if (!whole->done()) whole->finish({});
    return whole;
  }

  Status pull_one(PullOperation& operation, std::span<const int64_t> keys) {
    const TableSpec& spec = *operation.spec;
    auto* out = reinterpret_cast<std::byte*>(operation.out);
    const auto pull = [&](uint32_t shard, std::span<const int64_t> mine, const PullTarget& target) {
      Ack ack = store_.shard(shard).pull({.table = spec.id, .term = 1, .keys = mine}, target);
      versions_[shard] = ack.version;
      return std::move(ack.status);
    };
    if (spec.dense) {
      const PullTarget whole{.out = out, .in_place = true};
      return each(keys.size(), [&](size_t i) {
        return pull(shard_of_key(spec, keys[i], store_.shards()), keys.subspan(i, 1), whole);
      });
    }
    const auto scratch = arena_->allocate(keys.size() * 12);
    if (scratch == nullptr) return {Code::internal, "out of memory for the keys of a pull"};
    const SplitKeys split = split_into(spec, keys, *scratch);
    return each_group(split, [&](uint32_t shard) {
      const PullTarget target{.out = out,
                              .positions = split.positions + split.begin[shard],
                              .positions_end = static_cast<uint32_t>(keys.size()),
                              .stream = 4 * keys.size() * spec.dim >= kStreamBytesMin};
      return pull(shard, split.group(shard), target);
    });
  }

  Result<OperationPtr> send_push(const OperationPtr& operation, std::span<const PushItem> items,
                                 const PushOptions& options, bool sums_are_safe, Deadline deadline) override {
    const Writing writing(*this, options.mode == PushMode::update, deadline);
    if (!writing.status().ok()) return writing.status();
    ++pushes_;
    Begun begun(store_.shards());
    // Where a sum of duplicates might overflow, everything is looked at before anything is applied.
    for (const bool checking : {true, false}) {
      if (checking && sums_are_safe) continue;
      for (const PushItem& item : items) {
        const Status status = item.spec->dense ? (checking ? Status{} : push_pieces(item, options, begun))
                                               : push_rows(item, options, checking, begun);
        if (!status.ok()) return status;
      }
    }
    operation->finish({});
    return operation;
  }

  // Shards that have a part of this push already: each counts the whole of it as one update.
  using Begun = std::vector<std::atomic<bool>>;

  Status push_rows(const PushItem& item, const PushOptions& options, bool only_check, Begun& begun) {
    const TableSpec& spec = *item.spec;
    const auto scratch = arena_->allocate(item.keys.size() * 12);
    if (scratch == nullptr) return out_of_memory();
    const SplitKeys split = split_into(spec, item.keys, *scratch);
    return each_group(split, [&](uint32_t shard) {
      const MergedPtr merged = merge(spec, split, shard, item.values.data(), options);
      if (merged == nullptr) return out_of_memory();
      if (only_check) {
        return check_finite("push to " + title(spec) + " (duplicates summed)", merged->keys, merged->rows,
                            spec.dim, options.wire())
            .status;
      }
      PushPart part = part_of(item, shard, options);
      part.keys = merged->keys;
      part.values = std::as_bytes(std::span(merged->rows, merged->keys.size() * spec.dim));
      return put(shard, part, options, begun);
    });
  }

  Status push_pieces(const PushItem& item, const PushOptions& options, Begun& begun) {
    const TableSpec& spec = *item.spec;
    return each(spec.pieces(), [&](size_t i) {
      const auto piece = static_cast<int64_t>(i);
      const uint32_t shard = shard_of_key(spec, piece, store_.shards());
      PushPart part = part_of(item, shard, options);
      part.keys = {&piece, 1};
      part.values = std::as_bytes(item.values.subspan(i * kPieceFloats, spec.floats(piece)));
      part.dc_lambda = item.dc_lambda;
      if (item.dc_lambda != 0.0f)
        part.pulled = std::as_bytes(item.pulled.subspan(i * kPieceFloats, spec.floats(piece)));
      return put(shard, part, options, begun);
    });
  }

  PushPart part_of(const PushItem& item, uint32_t shard, const PushOptions& options) const {
    return {.table = item.spec->id,
            .term = 1,
            .mode = options.mode,
            .lr = item.lr,
            .version_read = versions_[shard],
            .by_staleness = options.by_staleness};
  }

  // The distinct keys of one shard's group and what is pushed to them; the memory is kept warm.
  struct Merged {
    Merger merger;
    GrowArray memory;
    std::span<const int64_t> keys = {};
    float* rows = nullptr;
  };
  using MergedPtr = Pool<Merged>::Held;

  // Null: out of memory.
  MergedPtr merge(const TableSpec& spec, const SplitKeys& split, uint32_t shard, const float* values,
                  const PushOptions& options) {
    MergedPtr merged = merged_.take();
    const size_t keys_bytes = round_up(size_t{8} * split.count(shard), 64);
    if (!merged->memory.reserve(keys_bytes + 4 * split.count(shard) * spec.dim)) return {};
    auto* keys = reinterpret_cast<int64_t*>(merged->memory.data());
    merged->rows = reinterpret_cast<float*>(merged->memory.data() + keys_bytes);
    merged->keys = {
        keys, merged->merger.merge(options.mode, split.group(shard), split.positions + split.begin[shard],
                                   values, static_cast<uint32_t>(spec.dim), keys, merged->rows)};
    return merged;
  }

  Status put(uint32_t number, const PushPart& part, const PushOptions& options, Begun& begun) {
    Shard& shard = store_.shard(number);
    if (options.stage_rank >= 0)
      return shard.stage(nullptr, {&part, 1}, static_cast<uint32_t>(options.stage_rank), options.step).status;
    return shard.push(nullptr, {&part, 1}, options.step, 0, begun[number].exchange(true)).status;
  }

  SplitKeys split_into(const TableSpec& spec, std::span<const int64_t> keys, const Block& memory) const {
    auto* grouped = reinterpret_cast<int64_t*>(memory.bytes().data());
    return split_keys(spec, keys, store_.shards(), grouped,
                      reinterpret_cast<uint32_t*>(grouped + keys.size()));
  }

  // Calls `work` for every item, with helpers unless `alone`; gives the first error.
  Status each(size_t items, const std::function<Status(size_t)>& work, bool alone = false) {
    std::mutex mutex;
    Status first;
    const auto note = [&](size_t i) {
      Status status = work(i);
      if (status.ok()) return;
      const std::lock_guard lock(mutex);
      if (first.ok()) first = std::move(status);
    };
    crew_.run(items, note, alone);
    return first;
  }

  // Calls `work` for every shard that has keys.
  Status each_group(const SplitKeys& split, const std::function<Status(uint32_t)>& work) {
    const auto if_any = [&](size_t i) {
      const auto shard = static_cast<uint32_t>(i);
      return split.count(shard) > 0 ? work(shard) : Status{};
    };
    return each(store_.shards(), if_any, split.begin.back() < kHelpRows);
  }

  const std::shared_ptr<SharedStore> shared_;
  Store& store_;
  WorkCrew& crew_;
  const std::shared_ptr<Arena> arena_;
  std::vector<std::atomic<uint64_t>> versions_;  // by shard, at the last pull
  Pool<Merged> merged_{kMergedKept};
  bool in_job_ = false;     // guarded by shared_->gate; as those of RemoteClient
  bool half_step_ = false;  // likewise
  std::atomic<bool> closed_{false};
  std::atomic<uint64_t> pulls_{0};
  std::atomic<uint64_t> pushes_{0};
};

}  // namespace

std::unique_ptr<StoreClient> make_embedded_client(uint32_t shards, size_t threads) {
  assert(shards >= 1 && shards <= kShardsMax);
  const size_t wanted = threads != 0 ? threads : std::clamp<size_t>(usable_cores(), 1, 8);
  return std::make_unique<EmbeddedClient>(std::make_shared<SharedStore>(shards, wanted));
}

}  // namespace shoal
