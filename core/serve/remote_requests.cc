// What a remote client sends: questions, pulls and pushes.
#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
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

bool has_pieces(const TableSpec& spec, uint32_t shard, uint32_t shards) {
  return (shard + shards - shard_of_key(spec, 0, shards)) % shards < spec.pieces();
}

Status misfit() { return {Code::internal, "a server's answer does not fit what it was asked"}; }

}  // namespace

Result<StoreClient::SpecPtr> RemoteClient::lookup(uint32_t table) {
  const std::lock_guard lock(mutex_);
  if (closing_) return closed_status();
  const auto it = tables_.find(table);
  return it == tables_.end() ? nullptr : it->second;
}

bool RemoteClient::any_shm() const {
  return std::any_of(peers_.begin(), peers_.begin() + servers(),
                     [](const auto& peer) { return peer->shm.load(); });
}

Status RemoteClient::send_question(const OperationPtr& operation, Kind kind, uint32_t version,
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
    request->header.member_term = version;
    if (part != nullptr) request->parts.push_back(*part);
    request->blocks.push_back(block);
    request->body.push_back(block->bytes().first(body.size()));
    request->body_bytes = body.size();
    submit(std::move(request));
  }
  return seal(operation).status();
}

Status RemoteClient::ask(Kind kind, const Part* part, std::span<const std::byte> body,
                         const std::function<OnReply()>& fresh, Deadline deadline) {
  for (;;) {
    const auto placement = builder_.placement();
    const std::vector<uint32_t> all = placement->up();
    const std::vector<uint32_t> servers =
        kind == Kind::scan ? std::vector{placement->reader(part->shard)} : all;
    const auto operation = std::make_shared<AskOperation>();
    operation->what = "a question to " + peers_[servers[0]]->address.name();
    if (fresh) operation->handler = fresh();
    Status status = send_question(operation, kind, placement->version, servers, part, body, deadline);
    if (status.ok()) status = wait(operation, deadline);
    if (status.code() != Code::moved) return status;
    // Some server has learnt another placement, or must still learn this one.
    const Deadline tick = std::min(deadline, Clock::now() + std::chrono::milliseconds(5));
    const Status other = until([&] { return builder_.placement() != placement; }, tick);
    if (other.code() == Code::closed) return other;
    if (Clock::now() >= deadline) return {Code::timeout, status.message()};
  }
}

Status RemoteClient::send_sync(const std::shared_ptr<SyncOperation>& operation, Deadline deadline) {
  const auto placement = builder_.placement();
  const uint32_t head = placement->head(0);
  const Status status = send_question(operation, Kind::sync, placement->version, {&head, 1}, nullptr,
                                      encode_sync(operation->request), deadline);
  const SyncVerb verb = operation->request.verb;
  if (!status.ok() || (verb != SyncVerb::open && verb != SyncVerb::advance && verb != SyncVerb::leave))
    return status;
  const std::lock_guard lock(mutex_);
  gate_.step_ended(verb != SyncVerb::leave);
  if (verb == SyncVerb::advance) clock_ = operation->request.step + 1;
  if (gate_.held()) {
    changed_.notify_all();
    wake();
  }
  return status;
}

Status RemoteClient::commit(const Commit& commit, Deadline deadline) {
  std::vector<std::byte> body;
  encode_commit(commit, body);
  bool begun = false;
  const auto begin = [&] { return begun || (begun = gate_.begin_commit()); };
  if (Status status = until(begin, deadline); !status.ok()) return status;
  Status status = ask(Kind::commit, nullptr, body, {}, deadline);
  const std::lock_guard lock(mutex_);
  gate_.end_commit();
  if (gate_.held()) changed_.notify_all();
  return status;
}

Result<double> RemoteClient::norm(const Commit& commit, Deadline deadline) {
  // Answers may come after the deadline, when this call is over: what they are written to is shared.
  std::shared_ptr<std::vector<double>> norms;
  const auto fresh = [&]() -> OnReply {
    norms = std::make_shared<std::vector<double>>(servers());
    return [norms](const Request& request, const FrameView& frame) {
      if (frame.body.size() < sizeof(double)) return misfit();
      std::memcpy(&(*norms)[request.server], frame.body.data(), sizeof(double));
      return Status{};
    };
  };
  std::vector<std::byte> body;
  encode_commit(commit, body);
  if (Status s = ask(Kind::norm, nullptr, body, fresh, deadline); !s.ok()) return s;
  return std::accumulate(norms->begin(), norms->end(), 0.0);
}

Status RemoteClient::declare(const TableSpec& spec, Deadline deadline) {
  if (Status status = check_table(spec); !status.ok()) return status;
  Status status = ask(Kind::declare, nullptr, encode_table(spec), {}, deadline);
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
  std::shared_ptr<Figures> sum;  // shared with answers that come too late, as above
  Part part;
  part.table = table;
  const auto fresh = [&]() -> OnReply {
    sum = std::make_shared<Figures>();
    return [sum](const Request&, const FrameView& frame) {
      Figures one;
      if (frame.body.size() < sizeof one) return misfit();
      std::memcpy(&one, frame.body.data(), sizeof one);
      *sum += one;
      return Status{};
    };
  };
  if (Status s = ask(Kind::figures, &part, {}, fresh, deadline); !s.ok()) return s;
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
  const auto fresh = [&take]() -> OnReply { return take; };  // the last answer is the one that counts
  if (Status s = ask(Kind::scan, &part, {}, fresh, deadline); !s.ok()) return s;
  return std::move(*page);
}

Result<StoreClient::OperationPtr> RemoteClient::send_pull(const OperationPtr& whole,
                                                          std::span<const Pull> pulls, Deadline deadline) {
  const bool shared = any_shm();
  if (Status status = begin(*whole, false, deadline); !status.ok()) return status;
  return sent_whole(whole, [&]() -> Result<OperationPtr> {
    // A server that writes into our memory is asked once; one that answers through a socket begins with
    // the first shards while the next are prepared.
    const size_t frame_bytes = shared || pulls.size() > 1 ? SIZE_MAX : kPullFrameBytes;
    const auto merger = mergers_.take();
    std::map<std::pair<uint32_t, bool>, std::vector<std::shared_ptr<Request>>> together;
    for (const Pull& pull : pulls) {
      const RequestBuilder::Grouped grouped = builder_.group(*pull.operation->spec, pull.keys, shared);
      if (grouped.block == nullptr) return give_up(whole, "out of memory for the keys of a pull");
      const auto bytes = shard_bytes(*grouped.split, 4 * pull.operation->row_floats + 8);
      for (const auto& frame : builder_.plan(bytes, frame_bytes, true)) {
        const bool shm = peers_[frame.server]->shm;
        auto request = builder_.pull(pull.operation, grouped, frame, shm, *merger);
        if (request == nullptr) return give_up(whole, "out of memory for the keys of a pull");
        if (request->body_bytes > kBodyBytesMax)
          return give_up(whole, "the keys of one shard are more than the 1 GiB of a frame; pull in parts",
                         Code::bad_input);
        if (pulls.size() == 1) {
          submit(std::move(request));
        } else {
          together[{request->server, request->body.empty()}].push_back(std::move(request));
        }
      }
    }
    for (auto& [server, requests] : together) {
      for (auto& some : RequestBuilder::cut(std::move(requests), kBodyBytesMax)) {
        auto request = RequestBuilder::join(std::move(some));
        request->operation = whole;
        submit(std::move(request));
      }
    }
    ++pulls_;
    return seal(whole);
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
Status RemoteClient::give_up(const OperationPtr& operation, const char* why, Code code) {
  const std::lock_guard lock(mutex_);
  machine_.seal(*operation);
  operation->sealed = true;
  background_ = true;
  changed_.notify_all();
  keeper_wanted_.notify_one();
  return {code, operation->what + ": " + why};
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
                                                          std::span<const PushItem> items,
                                                          const PushOptions& options, bool sums_are_safe,
                                                          Deadline deadline) {
  std::vector<RequestBuilder::Grouped> grouped(items.size());
  std::vector<size_t> bytes(shards());
  for (size_t i = 0; i < items.size(); ++i) {
    const TableSpec& spec = *items[i].spec;
    std::vector<size_t> one(shards());
    if (!spec.dense) {
      grouped[i] = builder_.group(spec, items[i].keys, false);
      if (grouped[i].block == nullptr) return Status{Code::internal, "out of memory for the keys of a push"};
      one = shard_bytes(*grouped[i].split, 4 * spec.dim + 8);
    }
    for (uint32_t piece = 0; spec.dense && piece < spec.pieces(); ++piece) {
      one[shard_of_key(spec, piece, shards())] +=
          4 * size_t{spec.floats(piece)} * (items[i].pulled.empty() ? 1 : 2);
    }
    std::transform(bytes.begin(), bytes.end(), one.begin(), bytes.begin(), std::plus<>());
  }
  if (const size_t largest = *std::max_element(bytes.begin(), bytes.end()); largest > kPushBodyBytesMax) {
    return Status{Code::bad_input, operation->what + ": " + std::to_string(largest) +
                                       " bytes for one shard are more than the 1 GiB of a frame; push in "
                                       "parts, or use more shards"};
  }
  if (items.size() > kPushPartsMax) {
    return Status{Code::bad_input, operation->what + ": " + std::to_string(items.size()) +
                                       " tables and tensors at once; at most " +
                                       std::to_string(kPushPartsMax)};
  }
  const auto frames = builder_.plan(bytes, kPushFrameBytes, false, items.size());
  const auto merger = mergers_.take();
  const auto build = [&](const RequestBuilder::Frame& frame, FiniteCheck* check) -> std::shared_ptr<Request> {
    const bool shm = peers_[frame.server]->shm;
    std::vector<std::shared_ptr<Request>> requests;
    for (size_t i = 0; i < items.size(); ++i) {
      RequestBuilder::Frame mine{frame.server, {}};
      for (const uint32_t shard : frame.shards) {
        if (!items[i].spec->dense) {
          if (grouped[i].split->count(shard) > 0) mine.shards.push_back(shard);
        } else if (has_pieces(*items[i].spec, shard, shards())) {
          requests.push_back(builder_.push_pieces(items[i], frame.server, shard, options, shm));
        }
      }
      if (!mine.shards.empty()) {
        requests.push_back(builder_.push(*grouped[i].split, mine, items[i], options, shm, *merger, check));
      }
    }
    const bool whole = std::find(requests.begin(), requests.end(), nullptr) == requests.end();
    return whole ? RequestBuilder::join(std::move(requests)) : nullptr;
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
  if (options.mode == PushMode::update) {
    const std::lock_guard lock(mutex_);
    gate_.pushed();
  }
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

}  // namespace shoal
