// What a remote client sends: questions, pulls and pushes.
#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>

#include "serve/remote_client.h"

namespace shoal {
namespace {

constexpr size_t kInFlightBytes = size_t{16} << 20;  // per server; stays in the last cache level

class AskOperation : public ClientOperation {
 public:
  std::function<Status(const Request&, const FrameView&)> handler;
  Status on_reply(const Request& request, const FrameView& frame) override {
    return handler ? handler(request, frame) : Status{};
  }
};

Status misfit() { return {Code::internal, "a server's answer does not fit what it was asked"}; }

}  // namespace

Result<StoreClient::SpecPtr> RemoteClient::lookup(uint32_t table) {
  const std::lock_guard lock(mutex_);
  if (closing_) return closed_status();
  const auto it = tables_.find(table);
  return it == tables_.end() ? nullptr : it->second;
}

bool RemoteClient::any_shm() const {
  return std::any_of(peers_.begin(), peers_.end(), [](const auto& peer) { return peer->shm.load(); });
}

Status RemoteClient::send_question(const OperationPtr& operation, Kind kind,
                                   std::span<const uint32_t> servers, const Part* part,
                                   std::span<const std::byte> body, Deadline deadline) {
  const auto block = builder_.allocate(body.size(), false);
  if (block == nullptr) return {Code::internal, "out of memory for a question"};
  if (!body.empty()) std::memcpy(block->bytes().data(), body.data(), body.size());
  if (Status status = begin(*operation, false, deadline); !status.ok()) return status;
  for (const uint32_t server : servers) {
    auto request = std::make_shared<Request>();
    request->operation = operation;
    request->server = server;
    request->header.kind = static_cast<uint16_t>(kind);
    if (part != nullptr) request->parts.push_back(*part);
    request->blocks.push_back(block);
    request->body.push_back(block->bytes().first(body.size()));
    request->body_bytes = body.size();
    submit(std::move(request));
  }
  return seal(operation).status();
}

// The same, waited for.
Status RemoteClient::ask(Kind kind, std::span<const uint32_t> servers, const Part* part,
                         std::span<const std::byte> body, OnReply on_reply, Deadline deadline) {
  const auto operation = std::make_shared<AskOperation>();
  operation->what = "a question to " + options_.servers[servers[0]].name();
  operation->handler = std::move(on_reply);
  const Status status = send_question(operation, kind, servers, part, body, deadline);
  return status.ok() ? wait(operation, deadline) : status;
}

Status RemoteClient::send_sync(const std::shared_ptr<SyncOperation>& operation, Deadline deadline) {
  return send_question(operation, Kind::sync, std::span(options_.placement).first(1), nullptr,
                       encode_sync(operation->request), deadline);
}

Status RemoteClient::commit(const Commit& commit, Deadline deadline) {
  std::vector<std::byte> body;
  encode_commit(commit, body);
  return ask(Kind::commit, everywhere_, nullptr, body, {}, deadline);
}

Result<double> RemoteClient::norm(const Commit& commit, Deadline deadline) {
  // Answers may come after the deadline, when this call is over: what they are written to is shared.
  const auto norms = std::make_shared<std::vector<double>>(peers_.size());
  const auto note = [norms](const Request& request, const FrameView& frame) {
    if (frame.body.size() < sizeof(double)) return misfit();
    std::memcpy(&(*norms)[request.server], frame.body.data(), sizeof(double));
    return Status{};
  };
  std::vector<std::byte> body;
  encode_commit(commit, body);
  if (Status s = ask(Kind::norm, everywhere_, nullptr, body, note, deadline); !s.ok()) return s;
  return std::accumulate(norms->begin(), norms->end(), 0.0);
}

Status RemoteClient::declare(const TableSpec& spec, Deadline deadline) {
  if (Status status = check_table(spec); !status.ok()) return status;
  Status status = ask(Kind::declare, everywhere_, nullptr, encode_table(spec), {}, deadline);
  if (!status.ok()) return status;
  auto shared = std::make_shared<TableSpec>(spec);
  shared->init.salt = mix64(spec.seed ^ hash_name(spec.name));
  const std::lock_guard lock(mutex_);
  tables_[spec.id] = std::move(shared);
  return {};
}

// Sums what all servers say of a table (0: of the store).
template <typename Figures>
Result<Figures> RemoteClient::sum_figures(uint32_t table, Deadline deadline) {
  const auto sum = std::make_shared<Figures>();  // shared with answers that come too late, as above
  Part part;
  part.table = table;
  const auto add = [sum](const Request&, const FrameView& frame) {
    Figures one;
    if (frame.body.size() < sizeof one) return misfit();
    std::memcpy(&one, frame.body.data(), sizeof one);
    *sum += one;
    return Status{};
  };
  if (Status s = ask(Kind::figures, everywhere_, &part, {}, add, deadline); !s.ok()) return s;
  return *sum;
}

Result<TableFigures> RemoteClient::figures(uint32_t table, Deadline deadline) {
  return sum_figures<TableFigures>(table, deadline);
}

Result<StoreFigures> RemoteClient::store_figures(Deadline deadline) {
  return sum_figures<StoreFigures>(0, deadline);
}

Result<ScanPage> RemoteClient::scan(uint32_t table, uint32_t shard, uint64_t cursor, size_t rows_max,
                                    Deadline deadline) {
  const auto spec = find(table, false);
  if (!spec.ok()) return spec.status();
  Part part;
  part.table = table;
  part.shard = static_cast<uint16_t>(shard);
  part.version = cursor;
  part.count = static_cast<uint32_t>(std::min<size_t>(rows_max, 65536));
  const auto page = std::make_shared<ScanPage>();  // shared with an answer that comes too late, as above
  const size_t dim = (*spec)->dim;
  const auto take = [page, dim](const Request&, const FrameView& frame) {
    if (frame.parts.size() != 1) return misfit();
    const Part& reply = frame.parts[0];
    const auto keys = array_in(frame.body, 0, size_t{8} * reply.count);
    const auto values = array_in(frame.body, reply.values_at, size_t{4} * reply.count * dim);
    if (!keys || !values) return misfit();
    page->keys.resize(reply.count);
    page->values.resize(reply.count * dim);
    if (reply.count > 0) {
      std::memcpy(page->keys.data(), keys->data(), keys->size());
      std::memcpy(page->values.data(), values->data(), values->size());
    }
    page->next = reply.version == 0 ? std::nullopt : std::optional<uint64_t>(reply.version);
    return Status{};
  };
  const auto server = std::span(options_.placement).subspan(shard, 1);
  if (Status s = ask(Kind::scan, server, &part, {}, take, deadline); !s.ok()) return s;
  return std::move(*page);
}

Result<StoreClient::OperationPtr> RemoteClient::send_pull(const std::shared_ptr<PullOperation>& operation,
                                                          std::span<const int64_t> keys, Deadline deadline) {
  const RequestBuilder::Grouped grouped = builder_.group(*operation->spec, keys, any_shm());
  if (grouped.block == nullptr) return Status{Code::internal, "out of memory for the keys of a pull"};
  if (Status status = begin(*operation, false, deadline); !status.ok()) return status;
  return sent_whole(operation, [&]() -> Result<OperationPtr> {
    // A server that writes into our memory is asked once; one that answers through a socket begins with
    // the first shards while the next are prepared.
    const size_t frame_bytes = any_shm() ? SIZE_MAX : kPullFrameBytes;
    const auto merger = mergers_.take();
    for (const auto& frame : builder_.plan(grouped.split, 4 * operation->row_floats, frame_bytes)) {
      const bool shm = peers_[builder_.server_of(frame[0])]->shm;
      auto request = builder_.pull(operation, grouped, frame, shm, *merger);
      if (request == nullptr) return give_up(operation, "out of memory for the keys of a pull");
      submit(std::move(request));
    }
    ++pulls_;
    return seal(operation);
  });
}

Status RemoteClient::send_budgeted(const OperationPtr& operation, std::shared_ptr<Request> request,
                                   Deadline deadline) {
  const uint32_t server = request->server;
  request->operation = operation;
  submit(std::move(request));
  pump_if_free();
  // Once under way a push cannot be taken back: a wait that is too long only means that more memory is
  // in flight than we like.
  const Status status = until([&] { return machine_.bytes_open(server) <= kInFlightBytes; }, deadline);
  return status.code() == Code::closed ? status : Status{};
}

// Ends an operation that cannot be sent whole; what was sent of it is still answered.
Status RemoteClient::give_up(const OperationPtr& operation, const char* why) {
  const std::lock_guard lock(mutex_);
  machine_.seal(*operation);
  background_ = true;
  changed_.notify_all();
  keeper_wanted_.notify_one();
  return {Code::internal, operation->what + ": " + why};
}

// Sends what `send` makes. An operation that has begun must be sealed, whatever fails: its seq would stay
// open.
Result<StoreClient::OperationPtr> RemoteClient::sent_whole(
    const OperationPtr& operation, const std::function<Result<OperationPtr>()>& send) {
  try {
    return send();
  } catch (const std::bad_alloc&) {
    return give_up(operation, "out of memory");
  }
}

Result<StoreClient::OperationPtr> RemoteClient::send_push(const OperationPtr& operation,
                                                          std::span<const int64_t> keys, const float* values,
                                                          const PushOptions& options, bool sums_are_safe,
                                                          Deadline deadline) {
  const TableSpec& spec = *operation->spec;
  const RequestBuilder::Grouped grouped = builder_.group(spec, keys, false);
  if (grouped.block == nullptr) return Status{Code::internal, "out of memory for the keys of a push"};
  if (grouped.split.count_max * (4 * spec.dim + 8) > kBodyBytesMax) {
    return Status{Code::bad_input,
                  operation->what + ": " + std::to_string(grouped.split.count_max) +
                      " rows for one shard are more than the 1 GiB of a frame; push in parts"};
  }
  const auto frames = builder_.plan(grouped.split, 4 * spec.dim, kPushFrameBytes);
  const auto merger = mergers_.take();
  const auto build = [&](const std::vector<uint32_t>& frame, FiniteCheck* check) {
    const bool shm = peers_[builder_.server_of(frame[0])]->shm;
    return builder_.push(spec, grouped.split, frame, values, options, shm, *merger, check);
  };
  // Where a sum might overflow, everything is merged and looked at before the first byte leaves.
  std::vector<std::shared_ptr<Request>> ready;
  FiniteCheck sums;
  for (size_t i = 0; i < frames.size() && !sums_are_safe; ++i) {
    ready.push_back(build(frames[i], &sums));
    if (ready.back() == nullptr || !sums.status.ok()) {
      return sums.status.ok() ? Status{Code::internal, "out of memory for a push"} : sums.status;
    }
  }
  if (Status status = begin(*operation, true, deadline); !status.ok()) return status;
  return sent_whole(operation, [&]() -> Result<OperationPtr> {
    for (size_t i = 0; i < frames.size(); ++i) {
      auto request = ready.empty() ? build(frames[i], nullptr) : std::move(ready[i]);
      if (request == nullptr) return give_up(operation, "out of memory in the middle of a push");
      if (Status status = send_budgeted(operation, std::move(request), deadline); !status.ok()) return status;
    }
    ++pushes_;
    return seal(operation);
  });
}

Result<StoreClient::OperationPtr> RemoteClient::send_tensor(const OperationPtr& operation,
                                                            std::span<const float> values,
                                                            const PushOptions& options, Deadline deadline) {
  const TableSpec& spec = *operation->spec;
  const size_t pieces_per_shard = spec.pieces() / shards() + 1;
  if (pieces_per_shard * 4 * kPieceFloats > kBodyBytesMax) {
    return Status{Code::bad_input, title(spec) + ": " + std::to_string(spec.dim) +
                                       " elements are more than 1 GiB per shard; use more shards"};
  }
  if (Status status = begin(*operation, true, deadline); !status.ok()) return status;
  return sent_whole(operation, [&]() -> Result<OperationPtr> {
    const uint32_t first = shard_of_key(spec, 0, shards());
    for (uint32_t i = 0; i < std::min(shards(), spec.pieces()); ++i) {
      const uint32_t shard = (first + i) % shards();
      const bool shm = peers_[builder_.server_of(shard)]->shm;
      auto request = builder_.push_pieces(spec, shard, values, options, shm);
      if (request == nullptr) return give_up(operation, "out of memory in the middle of a push");
      if (Status status = send_budgeted(operation, std::move(request), deadline); !status.ok()) return status;
    }
    ++pushes_;
    return seal(operation);
  });
}

}  // namespace shoal
