// What a remote client sends: how pulls and pushes become requests.
//
// A push to one shard is one part group in one frame: the shard applies it as one update with one dedupe
// record. Large pushes are cut into several frames of whole shards, so that a server applies the first
// while the client still merges the next; their memory is handed back as soon as the server answers, so
// a few warm blocks serve any amount.
#include <algorithm>
#include <cassert>
#include <cstring>

#include "serve/remote_client.h"

namespace shoal {
namespace {

constexpr size_t kFrameBytes = 256 * 1024;
constexpr size_t kInFlightBytes = size_t{16} << 20;  // per server; stays in the last cache level
constexpr size_t kMergersKept = 8;

size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64; }

std::string title(const TableSpec& spec) { return (spec.dense ? "tensor '" : "table '") + spec.name + "'"; }

// A pull whose rows come through a socket, and are put in their places here.
class PullOperation : public ClientOperation {
 public:
  std::shared_ptr<const TableSpec> spec;
  Codec codec = Codec::fp32;

  void on_reply(const Request& request, const FrameView& frame) override {
    for (const Part& part : frame.parts) {
      if (part.values_segment == 0 && !request.body.empty()) {
        spec->dense ? place_pieces(request, part, frame.body) : place_rows(request, part, frame.body);
      }
    }
  }

 private:
  void place_rows(const Request& request, const Part& part, std::span<const std::byte> body) {
    const auto dim = static_cast<uint32_t>(spec->dim);
    const size_t row_bytes = encoded_bytes(codec, dim);
    const auto values = array_in(body, part.values_at, part.count * row_bytes);
    if (!values || part.keys_at > request.keys.size() || part.count > request.keys.size() - part.keys_at) {
      return;  // a server that answers more than it was asked is not believed
    }
    for (size_t i = 0; i < part.count; ++i) {
      float* to = out + size_t{request.positions[part.keys_at + i]} * dim;
      decode_rows(codec, values->data() + i * row_bytes, 1, dim, to);
    }
  }

  void place_pieces(const Request& request, const Part& part, std::span<const std::byte> body) {
    if (part.keys_at > request.keys.size() || part.count > request.keys.size() - part.keys_at) {
      return;
    }
    uint32_t at = part.values_at;
    for (size_t i = 0; i < part.count; ++i) {
      const int64_t piece = request.keys[part.keys_at + i];
      const uint32_t floats = spec->floats(piece);
      const size_t bytes = encoded_bytes(codec, floats);
      const auto values = array_in(body, at, bytes);
      if (!values) {
        return;
      }
      decode_rows(codec, values->data(), 1, floats, out + static_cast<size_t>(piece) * kPieceFloats);
      at += static_cast<uint32_t>(bytes / 4);
    }
  }
};

class AskOperation : public ClientOperation {
 public:
  std::function<void(const FrameView&)> handler;
  void on_reply(const Request&, const FrameView& frame) override {
    if (handler) {
      handler(frame);
    }
  }
};

}  // namespace

Result<std::shared_ptr<const TableSpec>> RemoteClient::find(uint32_t table, bool dense) {
  const std::lock_guard lock(mutex_);
  if (closing_) {
    return Status{Code::closed, "this client was closed"};
  }
  const auto it = tables_.find(table);
  if (it == tables_.end() || it->second->dense != dense) {
    return Status{Code::unknown_table, "no " + std::string(dense ? "tensor" : "table") + " has the id " +
                                           std::to_string(table)};
  }
  return it->second;
}

bool RemoteClient::any_shm() const {
  return std::any_of(peers_.begin(), peers_.end(), [](const auto& peer) { return peer->shm.load(); });
}

std::shared_ptr<Block> RemoteClient::allocate(size_t bytes, bool shared) {
  if (shared) {
    if (auto block = shared_arena_->allocate(std::max<size_t>(bytes, 64))) {
      return block;
    }
  }
  return heap_arena_->allocate(std::max<size_t>(bytes, 64));
}

std::unique_ptr<Merger> RemoteClient::take_merger() {
  const std::lock_guard lock(mutex_);
  if (mergers_.empty()) {
    return std::make_unique<Merger>();
  }
  auto merger = std::move(mergers_.back());
  mergers_.pop_back();
  return merger;
}

void RemoteClient::give_back(std::unique_ptr<Merger> merger) {
  const std::lock_guard lock(mutex_);
  if (mergers_.size() < kMergersKept) {
    mergers_.push_back(std::move(merger));
  }
}

// One request to one server, waited for.
Status RemoteClient::ask(Kind kind, uint32_t server, const Part* part, std::vector<std::byte> body,
                         OnReply on_reply, Deadline deadline) {
  const auto operation = std::make_shared<AskOperation>();
  operation->what = "a question to " + options_.servers[server].name();
  operation->handler = std::move(on_reply);
  if (Status status = begin(*operation, false, deadline); !status.ok()) {
    return status;
  }
  auto request = std::make_shared<Request>();
  request->operation = operation;
  request->server = server;
  request->header.kind = static_cast<uint16_t>(kind);
  if (part != nullptr) {
    request->parts.push_back(*part);
  }
  request->blocks.push_back(allocate(body.size(), false));
  if (request->blocks[0] == nullptr) {
    return {Code::internal, "out of memory"};
  }
  std::memcpy(request->blocks[0]->bytes().data(), body.data(), body.size());
  request->body.push_back(request->blocks[0]->bytes().first(body.size()));
  request->body_bytes = body.size();
  submit(std::move(request));
  const Result<OperationPtr> sealed = seal(operation);
  return wait(*sealed, deadline);
}

Status RemoteClient::declare(const TableSpec& spec, Deadline deadline) {
  if (Status status = check_table(spec); !status.ok()) {
    return status;
  }
  for (uint32_t i = 0; i < peers_.size(); ++i) {
    if (Status status = ask(Kind::declare, i, nullptr, encode_table(spec), {}, deadline); !status.ok()) {
      return status;
    }
  }
  auto shared = std::make_shared<TableSpec>(spec);
  shared->init.salt = mix64(spec.seed ^ hash_name(spec.name));
  const std::lock_guard lock(mutex_);
  tables_[spec.id] = std::move(shared);
  return {};
}

Result<TableFigures> RemoteClient::figures(uint32_t table, Deadline deadline) {
  TableFigures sum;
  Part part;
  part.table = table;
  for (uint32_t i = 0; i < peers_.size(); ++i) {
    const auto add = [&sum](const FrameView& frame) {
      TableFigures one;
      if (frame.body.size() >= sizeof one) {
        std::memcpy(&one, frame.body.data(), sizeof one);
        sum += one;
      }
    };
    if (Status status = ask(Kind::figures, i, &part, {}, add, deadline); !status.ok()) {
      return status;
    }
  }
  return sum;
}

Result<ScanPage> RemoteClient::scan(uint32_t table, uint32_t shard, uint64_t cursor, size_t rows_max,
                                    Deadline deadline) {
  const auto spec = find(table, false);
  if (!spec.ok()) {
    return spec.status();
  }
  Part part;
  part.table = table;
  part.shard = static_cast<uint16_t>(shard);
  part.version = cursor;
  part.count = static_cast<uint32_t>(std::min<size_t>(rows_max, 65536));
  ScanPage page;
  const size_t dim = (*spec)->dim;
  const auto take = [&page, dim](const FrameView& frame) {
    if (frame.parts.size() != 1) {
      return;
    }
    const Part& reply = frame.parts[0];
    const auto keys = array_in(frame.body, 0, size_t{8} * reply.count);
    const auto values = array_in(frame.body, reply.values_at, size_t{4} * reply.count * dim);
    if (!keys || !values) {
      return;
    }
    page.keys.resize(reply.count);
    page.values.resize(reply.count * dim);
    std::memcpy(page.keys.data(), keys->data(), keys->size());
    std::memcpy(page.values.data(), values->data(), values->size());
    page.next = reply.version == 0 ? std::nullopt : std::optional<uint64_t>(reply.version);
  };
  if (Status s = ask(Kind::scan, options_.placement[shard], &part, {}, take, deadline); !s.ok()) {
    return s;
  }
  return page;
}

// ---- pulls

Status RemoteClient::prepare_rows(ClientOperation& operation, size_t rows, size_t row_floats, std::span<float> out) {
  if (Status status = check_out(operation.what, out, rows * row_floats); !status.ok()) {
    return status;
  }
  operation.rows = rows;
  operation.row_floats = row_floats;
  operation.out = out.data();
  if (out.data() == nullptr) {
    operation.block = allocate(4 * rows * row_floats, any_shm());
    if (operation.block == nullptr) {
      return {Code::internal, "out of memory for the " + std::to_string(rows) + " rows of a pull"};
    }
    operation.out = reinterpret_cast<float*>(operation.block->bytes().data());
  }
  return {};
}

std::shared_ptr<Request> RemoteClient::pull_into_segment(const TableSpec& spec, const SplitKeys& split,
                                                         const std::shared_ptr<Block>& keys, uint32_t server,
                                                         const OperationPtr& operation) {
  auto request = std::make_shared<Request>();
  request->blocks = {keys, operation->block};
  const auto base = static_cast<uint32_t>(keys->offset() / 4);
  const auto key_segment = static_cast<uint16_t>(keys->segment()->id());
  const auto value_segment = static_cast<uint16_t>(operation->block->segment()->id());
  const auto positions_base =
      static_cast<uint32_t>(reinterpret_cast<std::byte*>(split.positions) - keys->bytes().data()) / 4;
  for (uint32_t shard = 0; shard < shards(); ++shard) {
    if (split.count(shard) == 0 || options_.placement[shard] != server) {
      continue;
    }
    Part part;
    part.shard = static_cast<uint16_t>(shard);
    part.table = spec.id;
    part.term = options_.terms[shard];
    part.count = split.count(shard);
    part.keys_segment = key_segment;
    part.keys_at = base + split.begin[shard] * 2;
    part.positions_at = base + positions_base + split.begin[shard];
    part.positions_end = static_cast<uint32_t>(operation->rows);
    part.values_segment = value_segment;
    part.values_at = static_cast<uint32_t>(operation->block->offset() / 4);
    request->parts.push_back(part);
  }
  return request;
}

std::shared_ptr<Request> RemoteClient::pull_inline(const TableSpec& spec, const SplitKeys& split, Codec codec,
                                                   uint32_t server, const OperationPtr&) {
  auto request = std::make_shared<Request>();
  size_t count = 0;
  for (uint32_t shard = 0; shard < shards(); ++shard) {
    count += options_.placement[shard] == server ? split.count(shard) : 0;
  }
  const auto block = allocate(padded(8 * count) + 4 * count, false);
  if (block == nullptr) {
    return nullptr;
  }
  auto* keys = reinterpret_cast<int64_t*>(block->bytes().data());
  auto* positions = reinterpret_cast<uint32_t*>(block->bytes().data() + padded(8 * count));
  size_t at = 0;
  for (uint32_t shard = 0; shard < shards(); ++shard) {
    const size_t n = split.count(shard);
    if (n == 0 || options_.placement[shard] != server) {
      continue;
    }
    std::memcpy(keys + at, split.keys + split.begin[shard], 8 * n);
    std::memcpy(positions + at, split.positions + split.begin[shard], 4 * n);
    Part part;
    part.shard = static_cast<uint16_t>(shard);
    part.codec = static_cast<uint8_t>(codec);
    part.table = spec.id;
    part.term = options_.terms[shard];
    part.count = static_cast<uint32_t>(n);
    part.keys_at = static_cast<uint32_t>(at * 2);
    request->parts.push_back(part);
    at += n;
  }
  request->blocks.push_back(block);
  request->keys = {keys, count};
  request->positions = positions;
  request->body_bytes = padded(8 * count);
  request->body.push_back(block->bytes().first(request->body_bytes));
  return request;
}

Result<StoreClient::OperationPtr> RemoteClient::send_pull(const std::shared_ptr<const TableSpec>& spec,
                                                          std::span<const int64_t> keys,
                                                          const OperationPtr& operation, Codec codec,
                                                          Deadline deadline) {
  const bool shared_rows = operation->block != nullptr && operation->block->segment() != nullptr;
  const auto block = allocate(12 * keys.size() + 64, shared_rows);
  if (block == nullptr) {
    return Status{Code::internal, "out of memory for the keys of a pull"};
  }
  auto* grouped = reinterpret_cast<int64_t*>(block->bytes().data());
  const SplitKeys split =
      split_keys(*spec, keys, shards(), grouped, reinterpret_cast<uint32_t*>(grouped + keys.size()));
  std::vector<bool> wanted(peers_.size());
  for (uint32_t shard = 0; shard < shards(); ++shard) {
    if (split.count(shard) > 0) {
      wanted[options_.placement[shard]] = true;
    }
  }
  if (Status status = begin(*operation, false, deadline); !status.ok()) {
    return status;
  }
  for (uint32_t server = 0; server < peers_.size(); ++server) {
    if (!wanted[server]) {
      continue;
    }
    const bool in_place = shared_rows && block->segment() != nullptr && peers_[server]->shm;
    auto request = in_place ? pull_into_segment(*spec, split, block, server, operation)
                            : pull_inline(*spec, split, codec, server, operation);
    if (request == nullptr) {
      return Status{Code::internal, "out of memory for the keys of a pull"};
    }
    request->operation = operation;
    request->server = server;
    request->header.kind = static_cast<uint16_t>(Kind::pull);
    submit(std::move(request));
  }
  return seal(operation);
}

Result<StoreClient::OperationPtr> RemoteClient::pull(uint32_t table, std::span<const int64_t> keys,
                                                     Codec codec, std::span<float> out, Deadline deadline) {
  const auto spec = find(table, false);
  if (!spec.ok()) {
    return spec.status();
  }
  const auto operation = std::make_shared<PullOperation>();
  operation->what = "pull from " + title(**spec);
  operation->spec = *spec;
  operation->codec = codec;
  if (Status status = prepare_rows(*operation, keys.size(), (*spec)->dim, out); !status.ok()) {
    return status;
  }
  {
    const std::lock_guard lock(mutex_);
    ++pulls_;
  }
  return send_pull(*spec, keys, operation, codec, deadline);
}

Result<StoreClient::OperationPtr> RemoteClient::pull_tensor(uint32_t tensor, Codec codec, std::span<float> out,
                                                            Deadline deadline) {
  const auto spec = find(tensor, true);
  if (!spec.ok()) {
    return spec.status();
  }
  const auto operation = std::make_shared<PullOperation>();
  operation->what = "pull of " + title(**spec);
  operation->spec = *spec;
  operation->codec = codec;
  if (Status status = prepare_rows(*operation, 1, (*spec)->dim, out); !status.ok()) {
    return status;
  }
  std::vector<int64_t> pieces((*spec)->pieces());
  for (size_t i = 0; i < pieces.size(); ++i) {
    pieces[i] = static_cast<int64_t>(i);
  }
  {
    const std::lock_guard lock(mutex_);
    ++pulls_;
  }
  return send_pull(*spec, pieces, operation, codec, deadline);
}

// ---- pushes

// Frames of whole shards, about kFrameBytes each, the servers' in turn.
std::vector<std::vector<uint32_t>> RemoteClient::plan_frames(const SplitKeys& split, size_t row_bytes) const {
  std::vector<std::vector<std::vector<uint32_t>>> by_server(peers_.size());
  std::vector<size_t> filled(peers_.size(), kFrameBytes);
  for (uint32_t shard = 0; shard < shards(); ++shard) {
    if (split.count(shard) == 0) {
      continue;
    }
    const uint32_t server = options_.placement[shard];
    if (filled[server] >= kFrameBytes) {
      by_server[server].emplace_back();
      filled[server] = 0;
    }
    by_server[server].back().push_back(shard);
    filled[server] += split.count(shard) * (row_bytes + 8);
  }
  std::vector<std::vector<uint32_t>> frames;
  for (size_t i = 0; std::any_of(by_server.begin(), by_server.end(), [&](auto& f) { return i < f.size(); }); ++i) {
    for (auto& of_server : by_server) {
      if (i < of_server.size()) {
        frames.push_back(std::move(of_server[i]));
      }
    }
  }
  return frames;
}

std::shared_ptr<Request> RemoteClient::merge_frame(const TableSpec& spec, const SplitKeys& split,
                                                   std::span<const uint32_t> frame_shards,
                                                   const float* values, const PushOptions& options,
                                                   Merger& merger, FiniteCheck* check) {
  const uint32_t server = options_.placement[frame_shards[0]];
  const auto dim = static_cast<uint32_t>(spec.dim);
  const bool shm = peers_[server]->shm;
  size_t room = 0;
  size_t largest = 0;
  for (const uint32_t shard : frame_shards) {
    room += padded(8 * split.count(shard)) + padded(4 * size_t{dim} * split.count(shard)) + 64;
    largest = std::max<size_t>(largest, split.count(shard));
  }
  const auto block = allocate(room, shm);
  if (block == nullptr) {
    return nullptr;
  }
  const bool shared = block->segment() != nullptr;
  const Codec codec = shared || options.mode != PushMode::update ? Codec::fp32 : options.codec;
  const auto plain = codec == Codec::fp32 ? nullptr : allocate(4 * largest * dim, false);
  const size_t row_bytes = encoded_bytes(codec, dim);
  auto request = std::make_shared<Request>();
  request->server = server;
  request->header.kind = static_cast<uint16_t>(Kind::push);
  request->header.step = options.step;
  request->blocks.push_back(block);
  const uint32_t base = shared ? static_cast<uint32_t>(block->offset() / 4) : 0;
  const uint16_t segment = shared ? static_cast<uint16_t>(block->segment()->id()) : uint16_t{0};
  std::byte* memory = block->bytes().data();
  size_t at = 0;
  for (const uint32_t shard : frame_shards) {
    const std::span<const int64_t> keys(split.keys + split.begin[shard], split.count(shard));
    const uint32_t* positions = split.positions + split.begin[shard];
    auto* keys_out = reinterpret_cast<int64_t*>(memory + at);
    std::byte* values_out = memory + at + padded(8 * keys.size());
    float* rows = codec == Codec::fp32 ? reinterpret_cast<float*>(values_out)
                                       : reinterpret_cast<float*>(plain->bytes().data());
    const uint32_t distinct = options.mode == PushMode::assign
                                  ? merger.keep_last(keys, positions, values, dim, keys_out, rows)
                                  : merger.merge(keys, positions, values, dim, keys_out, rows);
    if (check != nullptr && check->status.ok()) {
      *check = check_finite("push to " + title(spec) + " (duplicates summed)", {keys_out, distinct}, rows,
                            dim, codec);
    }
    if (codec != Codec::fp32) {
      encode_rows(codec, rows, distinct, dim, values_out);
    }
    Part part;
    part.shard = static_cast<uint16_t>(shard);
    part.codec = static_cast<uint8_t>(codec);
    part.mode = static_cast<uint8_t>(options.mode);
    part.table = spec.id;
    part.term = options_.terms[shard];
    part.count = distinct;
    part.lr = options.lr;
    part.keys_segment = segment;
    part.values_segment = segment;
    part.keys_at = base + static_cast<uint32_t>(at / 4);
    part.values_at = base + static_cast<uint32_t>((at + padded(8 * keys.size())) / 4);
    request->parts.push_back(part);
    at += padded(8 * keys.size()) + padded(row_bytes * distinct);
  }
  if (!shared) {
    request->body_bytes = at;
    request->body.push_back(block->bytes().first(at));
  }
  return request;
}

Status RemoteClient::send_budgeted(const OperationPtr& operation, std::shared_ptr<Request> request,
                                   Deadline deadline) {
  const uint32_t server = request->server;
  request->operation = operation;
  submit(std::move(request));
  pump_if_free();
  return until([&] { return machine_.bytes_open(server) <= kInFlightBytes; }, deadline);
}

Result<StoreClient::OperationPtr> RemoteClient::push(uint32_t table, std::span<const int64_t> keys,
                                                     const float* values, const PushOptions& options,
                                                     Deadline deadline) {
  const auto spec = find(table, false);
  if (!spec.ok()) {
    return spec.status();
  }
  const auto operation = std::make_shared<ClientOperation>();
  operation->what = "push to " + title(**spec);
  FiniteCheck finite;
  if (!keys.empty()) {
    const Codec codec = options.mode == PushMode::update ? options.codec : Codec::fp32;
    finite = check_finite(operation->what, keys, values, (*spec)->dim, codec);
  }
  if (!finite.status.ok()) {
    return finite.status;
  }
  const auto scratch = allocate(12 * keys.size() + 64, false);
  if (scratch == nullptr) {
    return Status{Code::internal, "out of memory for the keys of a push"};
  }
  auto* grouped = reinterpret_cast<int64_t*>(scratch->bytes().data());
  const SplitKeys split =
      split_keys(**spec, keys, shards(), grouped, reinterpret_cast<uint32_t*>(grouped + keys.size()));
  const auto frames = plan_frames(split, 4 * (*spec)->dim);
  std::unique_ptr<Merger> merger = take_merger();
  // Where a sum might overflow, everything is merged and looked at before the first byte leaves.
  std::vector<std::shared_ptr<Request>> ready;
  FiniteCheck sums;
  if (!finite.sums_are_safe) {
    for (const auto& frame : frames) {
      ready.push_back(merge_frame(**spec, split, frame, values, options, *merger, &sums));
      if (ready.back() == nullptr || !sums.status.ok()) {
        return sums.status.ok() ? Status{Code::internal, "out of memory for a push"} : sums.status;
      }
    }
  }
  if (Status status = begin(*operation, true, deadline); !status.ok()) {
    return status;
  }
  for (size_t i = 0; i < frames.size(); ++i) {
    auto request = ready.empty() ? merge_frame(**spec, split, frames[i], values, options, *merger, nullptr)
                                 : std::move(ready[i]);
    // From here on the push is under way: what is sent cannot be taken back, so a wait that is too long
    // only means that more memory is in flight than we like.
    if (request == nullptr) {
      return Status{Code::internal, "out of memory in the middle of a push"};
    }
    if (Status s = send_budgeted(operation, std::move(request), deadline); s.code() == Code::closed) {
      return s;
    }
  }
  give_back(std::move(merger));
  {
    const std::lock_guard lock(mutex_);
    ++pushes_;
  }
  return seal(operation);
}

std::shared_ptr<Request> RemoteClient::dense_frame(const TableSpec& spec, uint32_t shard,
                                                   std::span<const float> values, const PushOptions& options) {
  const uint32_t server = options_.placement[shard];
  const uint32_t first = (shard + shards() - shard_of_key(spec, 0, shards())) % shards();
  std::vector<int64_t> pieces;
  for (uint32_t piece = first; piece < spec.pieces(); piece += shards()) {
    pieces.push_back(piece);
  }
  const size_t key_bytes = padded(8 * pieces.size());
  const auto block = allocate(key_bytes + pieces.size() * (4 * size_t{kPieceFloats} + 64), peers_[server]->shm);
  if (block == nullptr) {
    return nullptr;
  }
  const bool shared = block->segment() != nullptr;
  const Codec codec = shared || options.mode != PushMode::update ? Codec::fp32 : options.codec;
  std::memcpy(block->bytes().data(), pieces.data(), 8 * pieces.size());
  size_t at = key_bytes;
  for (const int64_t piece : pieces) {
    const uint32_t floats = spec.floats(piece);
    const float* from = values.data() + static_cast<size_t>(piece) * kPieceFloats;
    encode_rows(codec, from, 1, floats, block->bytes().data() + at);
    at += encoded_bytes(codec, floats);
  }
  auto request = std::make_shared<Request>();
  request->server = server;
  request->header.kind = static_cast<uint16_t>(Kind::push);
  request->header.step = options.step;
  request->blocks.push_back(block);
  Part part;
  part.shard = static_cast<uint16_t>(shard);
  part.codec = static_cast<uint8_t>(codec);
  part.mode = static_cast<uint8_t>(options.mode);
  part.table = spec.id;
  part.term = options_.terms[shard];
  part.count = static_cast<uint32_t>(pieces.size());
  part.lr = options.lr;
  part.values_bytes = static_cast<uint32_t>((at - key_bytes) / 4);
  const uint32_t base = shared ? static_cast<uint32_t>(block->offset() / 4) : 0;
  part.keys_segment = part.values_segment =
      shared ? static_cast<uint16_t>(block->segment()->id()) : uint16_t{0};
  part.keys_at = base;
  part.values_at = base + static_cast<uint32_t>(key_bytes / 4);
  request->parts.push_back(part);
  if (!shared) {
    request->body_bytes = padded(at);
    request->body.push_back(block->bytes().first(request->body_bytes));
  }
  return request;
}

Result<StoreClient::OperationPtr> RemoteClient::push_tensor(uint32_t tensor, std::span<const float> values,
                                                            const PushOptions& options, Deadline deadline) {
  const auto spec = find(tensor, true);
  if (!spec.ok()) {
    return spec.status();
  }
  const auto operation = std::make_shared<ClientOperation>();
  operation->what = "push to " + title(**spec);
  const Codec codec = options.mode == PushMode::update ? options.codec : Codec::fp32;
  const FiniteCheck finite = check_finite(operation->what, {}, values.data(), values.size(), codec);
  if (!finite.status.ok()) {
    return finite.status;
  }
  if (Status status = begin(*operation, true, deadline); !status.ok()) {
    return status;
  }
  const uint32_t first = shard_of_key(**spec, 0, shards());
  for (uint32_t i = 0; i < std::min(shards(), (*spec)->pieces()); ++i) {
    auto request = dense_frame(**spec, (first + i) % shards(), values, options);
    if (request == nullptr) {
      return Status{Code::internal, "out of memory in the middle of a push"};
    }
    if (Status s = send_budgeted(operation, std::move(request), deadline); s.code() == Code::closed) {
      return s;
    }
  }
  {
    const std::lock_guard lock(mutex_);
    ++pushes_;
  }
  return seal(operation);
}

}  // namespace shoal
