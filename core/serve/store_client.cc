// What all clients share: the checks that stand before every request.
#include "serve/store_client.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <string>

#include "serve/request_builder.h"
#include "store/sync_shard.h"

namespace shoal {
namespace {

constexpr uint32_t kInfinityBits = 0x7f800000u;

// Names the first row that cannot be sent and counts all of them.
Status name_the_bad(const std::string& what, std::span<const int64_t> keys, const float* values,
                    size_t row_floats, float limit, bool finite) {
  size_t bad = 0;
  int64_t first = 0;
  float seen = 0.0f;
  const size_t rows = keys.empty() ? 1 : keys.size();
  for (size_t row = 0; row < rows; ++row) {
    for (size_t i = 0; i < row_floats; ++i) {
      const float x = values[row * row_floats + i];
      if (!std::isfinite(x) || std::fabs(x) > limit) {
        if (bad == 0) {
          first = keys.empty() ? static_cast<int64_t>(i) : keys[row];
          seen = x;
        }
        ++bad;
        if (!keys.empty()) break;  // count rows
      }
    }
  }
  const std::string unit = keys.empty() ? "element " : "key ";
  const std::string units = keys.empty() ? " elements" : " rows";
  std::string text = what + ": " + std::to_string(bad) + " of " +
                     std::to_string(keys.empty() ? row_floats : rows) + units + " cannot be sent, first " +
                     unit + std::to_string(first) + " with the value " + std::to_string(seen) + "; ";
  text += finite ? "it is too large for this wire format: use wire='fp32' or 'bf16', or scale the gradient"
                 : "every value must be finite: check the loss for NaN, or clip the gradient";
  return {Code::bad_input, text};
}

}  // namespace

FiniteCheck check_finite(const std::string& what, std::span<const int64_t> keys, const float* values,
                         size_t row_floats, Codec codec) {
  const size_t count = (keys.empty() ? 1 : keys.size()) * row_floats;
  const uint32_t bits = max_abs_bits(values, count);
  const float limit = encodable_max(codec);
  const float largest = std::bit_cast<float>(bits);
  if (bits >= kInfinityBits || largest > limit)
    return {name_the_bad(what, keys, values, row_floats, limit, bits < kInfinityBits), false};
  // At most keys.size() values are summed into one.
  const double bound = static_cast<double>(largest) * static_cast<double>(keys.empty() ? 1 : keys.size());
  return {{}, bound <= static_cast<double>(limit)};
}

Result<StoreClient::SpecPtr> StoreClient::find(uint32_t table, bool dense) {
  Result<SpecPtr> spec = lookup(table);
  if (spec.ok() && (*spec == nullptr || (*spec)->dense != dense)) {
    return Status{Code::unknown_table,
                  "no " + std::string(dense ? "tensor" : "table") + " has the id " + std::to_string(table)};
  }
  return spec;
}

Result<StoreClient::Pull> StoreClient::make_pull(const PullItem& item, Codec codec) {
  const auto spec = find(item.table, !item.keys);
  if (!spec.ok()) return spec.status();
  Pull pull{std::make_shared<PullOperation>(), {}, {}};
  PullOperation& operation = *pull.operation;
  if (item.keys) {
    pull.keys = *item.keys;
  } else {
    pull.pieces.resize((*spec)->pieces());
    std::iota(pull.pieces.begin(), pull.pieces.end(), int64_t{0});
    pull.keys = pull.pieces;
  }
  operation.what = "pull of " + title(**spec);
  operation.spec = *spec;
  operation.codec = codec;
  operation.rows = item.keys ? pull.keys.size() : 1;
  operation.row_floats = (*spec)->dim;
  const size_t floats = operation.rows * operation.row_floats;
  operation.out = item.out.floats.data();
  operation.keep = item.out.owner;
  if (operation.out == nullptr) {
    operation.block = allocate_rows(4 * floats);
    if (operation.block == nullptr) {
      return Status{Code::internal,
                    operation.what + ": out of memory for " + std::to_string(operation.rows) + " rows"};
    }
    operation.out = reinterpret_cast<float*>(operation.block->bytes().data());
  } else if (item.out.floats.size() != floats) {
    return Status{Code::bad_input, operation.what + ": out= has " + std::to_string(item.out.floats.size()) +
                                       " elements; " + std::to_string(floats) + " are needed"};
  }
  return pull;
}

Result<StoreClient::OperationPtr> StoreClient::pull(std::span<const PullItem> items, Codec codec,
                                                    Deadline deadline) {
  std::vector<Pull> pulls;
  for (const PullItem& item : items) {
    Result<Pull> pull = make_pull(item, codec);
    if (!pull.ok()) return pull.status();
    pulls.push_back(std::move(*pull));
  }
  if (pulls.size() == 1) return send_pull(pulls[0].operation, pulls, deadline);
  const auto whole = std::make_shared<ManyPulls>();
  whole->what = "pull of " + std::to_string(items.size()) + " tables";
  for (const Pull& pull : pulls) whole->pulls.push_back(pull.operation);
  return send_pull(whole, pulls, deadline);
}

Status StoreClient::check_item(const PushItem& item, const PushOptions& options, bool& sums_are_safe) const {
  const TableSpec& spec = *item.spec;
  const std::string what = "push to " + title(spec);
  if (spec.dense && item.values.size() != spec.dim) {
    return {Code::bad_input, title(spec) + " has " + std::to_string(spec.dim) + " elements; a push brought " +
                                 std::to_string(item.values.size())};
  }
  if (item.dc_lambda != 0.0f && item.pulled.size() != item.values.size()) {
    return {Code::bad_input, what + ": dc_lambda needs pulled=, the " + std::to_string(item.values.size()) +
                                 " values that the gradient was made from; these are " +
                                 std::to_string(item.pulled.size())};
  }
  const FiniteCheck finite = check_finite(what, item.keys, item.values.data(), spec.dim, options.wire());
  sums_are_safe = sums_are_safe && finite.sums_are_safe;
  if (!finite.status.ok() || item.dc_lambda == 0.0f) return finite.status;
  return check_finite(what + " (pulled)", {}, item.pulled.data(), item.pulled.size(), Codec::fp32).status;
}

Result<StoreClient::OperationPtr> StoreClient::push(std::vector<PushItem> items, const PushOptions& options,
                                                    Deadline deadline) {
  const auto operation = std::make_shared<ClientOperation>();
  bool sums_are_safe = true;
  for (PushItem& item : items) {
    Result<SpecPtr> spec = find(item.table, item.is_tensor);
    if (!spec.ok()) return spec.status();
    item.spec = *spec;
    operation->what = "push to " + title(**spec);
    if (item.is_empty()) continue;
    if (Status status = check_item(item, options, sums_are_safe); !status.ok()) return status;
  }
  std::erase_if(items, [](const PushItem& item) { return item.is_empty(); });
  if (items.empty()) {
    operation->finish({});
    return operation;
  }
  if (items.size() > 1) operation->what = "push to " + std::to_string(items.size()) + " tables";
  return send_push(operation, items, options, sums_are_safe, deadline);
}

Status SyncOperation::on_reply(const Request&, const FrameView& frame) {
  std::optional<SyncReply> decoded = decode_sync_reply(frame.body);
  if (!decoded) return {Code::internal, what + ": a server's answer does not fit what it was asked"};
  reply = std::move(*decoded);
  return {};
}

Result<std::shared_ptr<SyncOperation>> StoreClient::sync(SyncRequest request, Deadline deadline) {
  const auto operation = std::make_shared<SyncOperation>();
  static std::atomic<uint64_t> asked{0};  // one order for all clients of this process
  request.number = ++asked;
  request.applied = applied_;
  operation->what = "rank " + std::to_string(request.rank) + " in step " + std::to_string(request.step);
  operation->request = std::move(request);
  if (Status status = send_sync(operation, deadline); !status.ok()) return status;
  return operation;
}

Result<double> StoreClient::carry(const SyncReply& reply, Deadline deadline) {
  double total = 0.0;
  for (Commit next : reply.commits) {
    if (next.seq <= applied_) continue;
    total = 0.0;
    if (next.clip > 0.0f) {
      const Result<double> squared = norm(next, deadline);
      if (!squared.ok()) return squared.status();
      // NaN: a later commit is done already, so this one is, everywhere.
      total = std::isnan(*squared) ? 0.0 : std::sqrt(*squared);
      next.scale = static_cast<float>(std::min(1.0, double{next.clip} / (total + 1e-6)));
    }
    if (Status status = commit(next, deadline); !status.ok()) return status;
    uint64_t before = applied_;
    while (before < next.seq && !applied_.compare_exchange_weak(before, next.seq)) {
    }
  }
  return total;
}

Status StoreClient::late_sync(const SyncOperation& operation) {
  std::string text = operation.what + " is waiting";
  SyncRequest question;
  question.rank = operation.request.rank;
  const Deadline soon = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  const auto state = sync(question, soon);
  if (!state.ok() || !wait(*state, soon).ok()) return {Code::timeout, text + " for the sync shard's server"};
  const std::vector<uint64_t>& numbers = (*state)->reply.numbers;
  const char* between = " for rank ";
  for (size_t i = 1; i + 2 < numbers.size(); i += 3) {
    const auto phase = static_cast<SyncShard::Phase>(numbers[i + 1]);
    const bool comes = phase == SyncShard::Phase::absent || phase == SyncShard::Phase::gone;
    if (phase != SyncShard::Phase::working && !comes) continue;
    text += between + std::to_string((i - 1) / 3) +
            (comes ? " (not here yet" : " (in step " + std::to_string(numbers[i])) + ", since " +
            std::to_string(numbers[i + 2] / 1000) + " s)";
    between = ", rank ";
  }
  return {Code::timeout, text + "; ask again to go on waiting"};
}

Result<std::unique_ptr<StoreClient>> StoreClient::fork() {
  return Status{Code::bad_input, "only a client of an embedded store can be forked: connect another one"};
}

}  // namespace shoal
