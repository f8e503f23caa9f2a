// The store within this process: the same shards and kernels as a server's, called directly.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cassert>
#include <functional>
#include <mutex>

#include "base/copy.h"
#include "base/grow_array.h"
#include "base/work_crew.h"
#include "serve/request_builder.h"
#include "serve/split.h"
#include "serve/store_client.h"

namespace shoal {
namespace {

constexpr size_t kHelpRows = 2048;  // below this a call is over before a helper is awake
constexpr size_t kWarmBytes = size_t{1} << 30;

// Memory for merging one shard's group, kept warm between calls.
struct Scratch {
  Merger merger;
  std::vector<int64_t> keys;
  GrowArray memory;
  uint32_t distinct = 0;

  float* rows() { return reinterpret_cast<float*>(memory.data()); }
};

class ScratchPool {
 public:
  std::unique_ptr<Scratch> take(size_t keys, size_t dim) {
    std::unique_ptr<Scratch> scratch;
    {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        scratch = std::move(free_.back());
        free_.pop_back();
      }
    }
    if (scratch == nullptr) {
      scratch = std::make_unique<Scratch>();
    }
    if (scratch->keys.size() < keys) {
      scratch->keys.resize(keys);
    }
    return scratch->memory.reserve(4 * keys * dim) ? std::move(scratch) : nullptr;
  }

  void give_back(std::unique_ptr<Scratch> scratch) {
    const std::lock_guard lock(mutex_);
    if (free_.size() < kKept) {
      free_.push_back(std::move(scratch));
    }
  }

 private:
  static constexpr size_t kKept = 16;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Scratch>> free_;  // guarded by mutex_
};

// The first failure of several threads.
class FirstError {
 public:
  void note(Status status) {
    if (!status.ok()) {
      const std::lock_guard lock(mutex_);
      if (status_.ok()) {
        status_ = std::move(status);
      }
    }
  }
  Status take() { return std::move(status_); }

 private:
  std::mutex mutex_;
  Status status_;
};

class EmbeddedClient : public StoreClient {
 public:
  EmbeddedClient(uint32_t shards, size_t threads)
      : store_(shards), crew_(threads - 1), arena_(make_heap_arena(kWarmBytes)) {}

  Status declare(const TableSpec& spec, Deadline) override {
    return closed_ ? closed_status() : store_.declare(spec);
  }

  Result<OperationPtr> pull(uint32_t table, std::span<const int64_t> keys, Codec, OutMemory out,
                            Deadline) override {
    const auto spec = find(table, false);
    if (!spec.ok()) return spec.status();
    if (Status status = check_out("pull from " + title(**spec), out, keys.size() * (*spec)->dim);
        !status.ok()) {
      return status;
    }
    const auto operation = make_rows("pull from", **spec, keys.size(), (*spec)->dim, out);
    const auto scratch = arena_->allocate(keys.size() * 12 + 64);
    if (operation == nullptr || scratch == nullptr) {
      return Status{Code::internal, "out of memory for a pull of " + std::to_string(keys.size()) + " rows"};
    }
    const SplitKeys split = split_into(**spec, keys, *scratch);
    FirstError failed;
    each_shard(split, [&](uint32_t shard) {
      const PullTarget target{.out = reinterpret_cast<std::byte*>(operation->out),
                              .positions = split.positions + split.begin[shard],
                              .positions_end = static_cast<uint32_t>(keys.size()),
                              .stream = 4 * keys.size() * (*spec)->dim >= kStreamBytesMin};
      const PullPart part{.table = table, .term = 1, .keys = group(split, shard)};
      failed.note(store_.shard(shard).pull(part, target).status);
    });
    ++pulls_;
    return finish(operation, failed.take());
  }

  Result<OperationPtr> push(uint32_t table, std::span<const int64_t> keys, const float* values,
                            const PushOptions& options, Deadline) override {
    const auto spec = find(table, false);
    if (!spec.ok()) return spec.status();
    const auto operation = std::make_shared<ClientOperation>();
    operation->what = "push to " + title(**spec);
    if (keys.empty()) return finish(operation, {});
    // What a wire format cannot carry is refused here too, so that a program tested in memory runs on
    // servers.
    const Codec codec = options.mode == PushMode::update ? options.codec : Codec::fp32;
    const FiniteCheck finite = check_finite(operation->what, keys, values, (*spec)->dim, codec);
    const auto scratch = arena_->allocate(keys.size() * 12 + 64);
    if (!finite.status.ok() || scratch == nullptr) {
      return finite.status.ok() ? Status{Code::internal, "out of memory for a push"} : finite.status;
    }
    const SplitKeys split = split_into(**spec, keys, *scratch);
    ++pushes_;
    if (finite.sums_are_safe) {
      FirstError failed;
      each_shard(split, [&](uint32_t shard) {
        std::unique_ptr<Scratch> merged = merge(**spec, split, shard, values, options.mode);
        failed.note(merged == nullptr ? Status{Code::internal, "out of memory for a push"}
                                      : apply(table, shard, *merged, options));
        pool_.give_back(std::move(merged));
      });
      return finish(operation, failed.take());
    }
    return push_checked(operation, **spec, split, values, options);
  }

  Result<OperationPtr> pull_tensor(uint32_t tensor, Codec, OutMemory out, Deadline) override {
    const auto spec = find(tensor, true);
    if (!spec.ok()) return spec.status();
    if (Status status = check_out("pull of " + title(**spec), out, (*spec)->dim); !status.ok()) return status;
    const auto operation = make_rows("pull of", **spec, 1, (*spec)->dim, out);
    if (operation == nullptr) return Status{Code::internal, "out of memory for " + title(**spec)};
    const PullTarget target{.out = reinterpret_cast<std::byte*>(operation->out), .in_place = true};
    FirstError failed;
    crew_.run((*spec)->pieces(), [&](size_t i) {
      const auto piece = static_cast<int64_t>(i);
      const uint32_t shard = shard_of_key(**spec, piece, store_.shards());
      failed.note(store_.shard(shard).pull({.table = tensor, .term = 1, .keys = {&piece, 1}}, target).status);
    });
    ++pulls_;
    return finish(operation, failed.take());
  }

  Result<OperationPtr> push_tensor(uint32_t tensor, std::span<const float> values, const PushOptions& options,
                                   Deadline) override {
    const auto spec = find(tensor, true);
    if (!spec.ok()) return spec.status();
    if (values.size() != (*spec)->dim) {
      return Status{Code::bad_input, title(**spec) + " has " + std::to_string((*spec)->dim) +
                                         " elements; a push brought " + std::to_string(values.size())};
    }
    const auto operation = std::make_shared<ClientOperation>();
    operation->what = "push to " + title(**spec);
    const FiniteCheck finite = check_finite(operation->what, {}, values.data(), values.size(), Codec::fp32);
    if (!finite.status.ok()) return finite.status;
    FirstError failed;
    crew_.run((*spec)->pieces(), [&](size_t i) {
      const auto piece = static_cast<int64_t>(i);
      PushPart part{.table = tensor, .term = 1, .mode = options.mode, .lr = options.lr};
      part.keys = {&piece, 1};
      part.values = std::as_bytes(values.subspan(i * kPieceFloats, (*spec)->floats(piece)));
      const uint32_t shard = shard_of_key(**spec, piece, store_.shards());
      failed.note(store_.shard(shard).push(nullptr, {&part, 1}, options.step).status);
    });
    ++pushes_;
    return finish(operation, failed.take());
  }

  Result<TableFigures> figures(uint32_t table, Deadline) override {
    TableFigures sum;
    for (uint32_t s = 0; s < store_.shards(); ++s) {
      const Result<TableFigures> one = store_.shard(s).figures(table);
      if (!one.ok()) return one.status();
      sum += *one;
    }
    return sum;
  }

  Result<ScanPage> scan(uint32_t table, uint32_t shard, uint64_t cursor, size_t rows_max, Deadline) override {
    return closed_ ? Result<ScanPage>(closed_status()) : store_.shard(shard).scan(table, cursor, rows_max);
  }

  Status wait(const OperationPtr& operation, Deadline) override { return operation->status(); }
  void leave(const OperationPtr&) override {}
  ClientCounters counters() override { return {.lanes = {"memory"}, .pulls = pulls_, .pushes = pushes_}; }
  uint32_t shards() const override { return store_.shards(); }
  void close() override { closed_ = true; }

 private:
  static Status closed_status() { return {Code::closed, "this client was closed"}; }

  Result<std::shared_ptr<const TableSpec>> find(uint32_t table, bool dense) {
    if (closed_) return closed_status();
    auto spec = store_.table(table);
    if (spec == nullptr || spec->dense != dense) {
      return Status{Code::unknown_table,
                    "no " + std::string(dense ? "tensor" : "table") + " has the id " + std::to_string(table)};
    }
    return spec;
  }

  OperationPtr make_rows(const char* verb, const TableSpec& spec, size_t rows, size_t row_floats,
                         const OutMemory& out) {
    auto operation = std::make_shared<ClientOperation>();
    operation->what = std::string(verb) + " " + title(spec);
    operation->rows = rows;
    operation->row_floats = row_floats;
    operation->out = out.floats.data();
    operation->keep = out.owner;
    if (operation->out == nullptr) {
      operation->block = arena_->allocate(std::max<size_t>(64, 4 * rows * row_floats));
      if (operation->block == nullptr) return nullptr;
      operation->out = reinterpret_cast<float*>(operation->block->bytes().data());
    }
    return operation;
  }

  Result<OperationPtr> finish(const OperationPtr& operation, Status status) {
    if (!status.ok()) return status;
    operation->finish({});
    return operation;
  }

  SplitKeys split_into(const TableSpec& spec, std::span<const int64_t> keys, const Block& memory) const {
    auto* grouped = reinterpret_cast<int64_t*>(memory.bytes().data());
    return split_keys(spec, keys, store_.shards(), grouped,
                      reinterpret_cast<uint32_t*>(grouped + keys.size()));
  }

  static std::span<const int64_t> group(const SplitKeys& split, uint32_t shard) {
    return {split.keys + split.begin[shard], split.count(shard)};
  }

  // Calls `work` for every shard that has keys, with helpers where it pays.
  void each_shard(const SplitKeys& split, const std::function<void(uint32_t)>& work) {
    const auto if_any = [&](size_t shard) {
      if (split.count(static_cast<uint32_t>(shard)) > 0) {
        work(static_cast<uint32_t>(shard));
      }
    };
    if (split.begin.back() >= kHelpRows) {
      crew_.run(store_.shards(), if_any);
      return;
    }
    for (size_t shard = 0; shard < store_.shards(); ++shard) {
      if_any(shard);
    }
  }

  std::unique_ptr<Scratch> merge(const TableSpec& spec, const SplitKeys& split, uint32_t shard,
                                 const float* values, PushMode mode) {
    const auto dim = static_cast<uint32_t>(spec.dim);
    std::unique_ptr<Scratch> scratch = pool_.take(split.count(shard), dim);
    if (scratch == nullptr) return nullptr;
    const uint32_t* positions = split.positions + split.begin[shard];
    scratch->distinct = mode == PushMode::assign
                            ? scratch->merger.keep_last(group(split, shard), positions, values, dim,
                                                        scratch->keys.data(), scratch->rows())
                            : scratch->merger.merge(group(split, shard), positions, values, dim,
                                                    scratch->keys.data(), scratch->rows());
    return scratch;
  }

  Status apply(uint32_t table, uint32_t shard, Scratch& merged, const PushOptions& options) {
    const size_t dim = store_.table(table)->dim;
    PushPart part{.table = table, .term = 1, .mode = options.mode, .lr = options.lr};
    part.keys = {merged.keys.data(), merged.distinct};
    part.values = std::as_bytes(std::span(merged.rows(), merged.distinct * dim));
    return store_.shard(shard).push(nullptr, {&part, 1}, options.step).status;
  }

  // Values so large that a sum of duplicates might overflow: everything is merged and looked at before
  // anything is applied.
  Result<OperationPtr> push_checked(const OperationPtr& operation, const TableSpec& spec,
                                    const SplitKeys& split, const float* values, const PushOptions& options) {
    std::vector<std::pair<uint32_t, std::unique_ptr<Scratch>>> all;
    for (uint32_t shard = 0; shard < store_.shards(); ++shard) {
      if (split.count(shard) == 0) continue;
      all.emplace_back(shard, merge(spec, split, shard, values, options.mode));
      Scratch* merged = all.back().second.get();
      if (merged == nullptr) return Status{Code::internal, "out of memory for a push"};
      const FiniteCheck sums =
          check_finite(operation->what + " (duplicates summed)", {merged->keys.data(), merged->distinct},
                       merged->rows(), spec.dim, Codec::fp32);
      if (!sums.status.ok()) return sums.status;
    }
    Status failed;
    for (auto& [shard, merged] : all) {
      Status status = apply(spec.id, shard, *merged, options);
      failed = failed.ok() ? status : failed;
      pool_.give_back(std::move(merged));
    }
    return finish(operation, failed);
  }

  Store store_;
  WorkCrew crew_;
  const std::shared_ptr<Arena> arena_;
  ScratchPool pool_;
  std::atomic<bool> closed_{false};
  std::atomic<uint64_t> pulls_{0};
  std::atomic<uint64_t> pushes_{0};
};

}  // namespace

std::unique_ptr<StoreClient> make_embedded_client(uint32_t shards, size_t threads) {
  assert(shards >= 1 && shards <= kShardsMax);
  const size_t wanted = threads != 0 ? threads : std::clamp<size_t>(usable_cores(), 1, 8);
  return std::make_unique<EmbeddedClient>(shards, wanted);
}

}  // namespace shoal
