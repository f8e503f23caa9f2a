#include "serve/request_builder.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <iterator>
#include <map>

#include "base/copy.h"

namespace shoal {
namespace {

constexpr uint32_t kInfinityBits = 0x7f800000u;

size_t padded(size_t bytes) { return round_up(bytes, 64); }

// Where the arrays of a frame lie: in its body, or in a shared segment.
struct Place {
  uint16_t segment = 0;
  uint32_t base = 0;  // offset of the block in its memory, in units of four bytes

  static Place of(const Block& block) {
    if (block.segment() == nullptr) return {};
    return {static_cast<uint16_t>(block.segment()->id()), static_cast<uint32_t>(block.offset() / 4)};
  }
  uint32_t at(size_t bytes) const { return base + static_cast<uint32_t>(bytes / 4); }
};

}  // namespace

Status PullOperation::on_reply(const Request& request, const FrameView& frame) {
  if (request.body.empty()) return {};  // the server wrote into our memory
  for (const Part& part : frame.parts) {
    const bool asked =
        part.keys_at <= request.keys.size() && part.count <= request.keys.size() - part.keys_at;
    Status status = !asked        ? misfit()
                    : spec->dense ? place_pieces(request, part, frame.body)
                                  : place_rows(request, part, frame.body);
    if (!status.ok()) return status;
  }
  return {};
}

Status ManyPulls::on_reply(const Request& request, const FrameView& frame) {
  for (Part part : frame.parts) {
    size_t i = 0;
    while (i < request.joined.size() && part.keys_at >= request.joined[i]->keys.size())
      part.keys_at -= static_cast<uint32_t>(request.joined[i++]->keys.size());
    if (i == request.joined.size()) continue;  // into shared memory, or of no rows
    const Request& one = *request.joined[i];
    if (Status status = one.operation->on_reply(one, {frame.header, {&part, 1}, frame.body}); !status.ok())
      return status;
  }
  return {};
}

Status PullOperation::misfit() const {
  return {Code::internal, what + ": a server's answer does not fit what it was asked"};
}

Status PullOperation::too_large(const std::string& where) const {
  return {Code::bad_input, what + ": " + where +
                               " holds a value that this wire format cannot carry; pull it with "
                               "wire='fp32'"};
}

Status PullOperation::place_rows(const Request& request, const Part& part, std::span<const std::byte> body) {
  const auto dim = static_cast<uint32_t>(spec->dim);
  const size_t row_bytes = encoded_bytes(codec, dim);
  const auto values = array_in(body, part.values_at, part.count * row_bytes);
  if (!values) return misfit();
  const bool stream = 4 * rows * row_floats >= kStreamBytesMin;
  std::vector<float> decoded(codec == Codec::fp32 ? 0 : dim);
  for (size_t n = part.keys_at; n < size_t{part.keys_at} + part.count; ++n) {
    const std::byte* from = values->data() + (n - part.keys_at) * row_bytes;
    if (codec != Codec::fp32) {
      decode_rows(codec, from, 1, dim, decoded.data());
      if (max_abs_bits(decoded.data(), dim) >= kInfinityBits)
        return too_large("key " + std::to_string(request.keys[n]));
      from = reinterpret_cast<const std::byte*>(decoded.data());
    }
    for (uint32_t i = request.heads[n]; i != Merger::kNone; i = request.before[i])
      copy_floats(out + size_t{request.positions[i]} * dim, from, dim, stream);
  }
  if (stream) finish_streaming();
  return {};
}

Status PullOperation::place_pieces(const Request& request, const Part& part,
                                   std::span<const std::byte> body) {
  size_t at = size_t{4} * part.values_at;
  for (size_t i = 0; i < part.count; ++i) {
    const int64_t piece = request.keys[part.keys_at + i];
    const uint32_t floats = spec->floats(piece);
    const size_t bytes = encoded_bytes(codec, floats);
    if (at > body.size() || bytes > body.size() - at) return misfit();
    float* to = out + static_cast<size_t>(piece) * kPieceFloats;
    decode_rows(codec, body.data() + at, 1, floats, to);
    if (codec != Codec::fp32 && max_abs_bits(to, floats) >= kInfinityBits)
      return too_large("piece " + std::to_string(piece));
    at += bytes;
  }
  return {};
}

RequestBuilder::RequestBuilder(PlacementPtr placement, std::shared_ptr<Arena> shared,
                               std::shared_ptr<Arena> heap)
    : placement_(placement),
      shared_(std::move(shared)),
      heap_(std::move(heap)),
      versions_(placement->shards.size()) {
  assert(heap_ != nullptr);
  for (auto& version : versions_) version = kNoVersion;
}

std::vector<std::shared_ptr<Request>> RequestBuilder::route(std::shared_ptr<Request> request) const {
  const PlacementPtr now = placement();
  const auto kind = static_cast<Kind>(request->header.kind);
  if (kind == Kind::sync) {
    request->header.member_term = now->version;
    request->server = now->head(0);
  }
  if (kind != Kind::push && kind != Kind::pull && kind != Kind::scan) return {std::move(request)};
  const auto target = [&](const Part& part) {
    if (kind == Kind::push) return now->head(part.shard);
    return kind == Kind::pull ? now->pulled_from(part.shard) : now->reader(part.shard);
  };
  for (Part& part : request->parts) {
    part.term = now->shards[part.shard].term;
    if (kind == Kind::pull) part.mode = now->any_copy ? kAnyCopy : 0;
  }
  const bool together = std::all_of(request->parts.begin(), request->parts.end(), [&](const Part& part) {
    return target(part) == target(request->parts[0]);
  });
  if (together) {
    if (!request->parts.empty()) request->server = target(request->parts[0]);
    return {std::move(request)};
  }
  std::map<uint32_t, std::shared_ptr<Request>> by_server;
  for (const Part& part : request->parts) {
    const uint32_t server = target(part);
    std::shared_ptr<Request>& one = by_server[server];
    if (one == nullptr) {
      one = std::make_shared<Request>(*request);
      one->parts.clear();
      one->server = server;
    }
    one->parts.push_back(part);
  }
  std::vector<std::shared_ptr<Request>> requests;
  for (auto& [server, one] : by_server) requests.push_back(std::move(one));
  return requests;
}

std::shared_ptr<Block> RequestBuilder::allocate(size_t bytes, bool shared) const {
  if (shared && shared_ != nullptr) {
    auto block = shared_->allocate(std::max<size_t>(bytes, 64));
    // What a part can name: 65,535 segments, and 16 GiB of each.
    if (block != nullptr && block->segment()->id() <= 0xffff &&
        (block->offset() + block->bytes().size()) / 4 <= 0xffffffff) {
      return block;
    }
  }
  return heap_->allocate(std::max<size_t>(bytes, 64));
}

Part RequestBuilder::part_of(const TableSpec& spec, uint32_t shard, Codec codec) const {
  Part part;
  part.shard = static_cast<uint16_t>(shard);
  part.codec = static_cast<uint8_t>(codec);
  part.table = spec.id;
  return part;
}

std::shared_ptr<Request> RequestBuilder::push_request(uint32_t server, std::shared_ptr<Block> block,
                                                      const PushOptions& options) const {
  auto request = std::make_shared<Request>();
  request->server = server;
  request->header.kind = static_cast<uint16_t>(Kind::push);
  request->header.step = options.step;
  request->header.flags =
      (options.stage_rank < 0 ? uint32_t{kApply} : kStage) | (options.by_staleness ? kByStaleness : 0u);
  request->header.rank = static_cast<uint32_t>(std::max<int64_t>(0, options.stage_rank));
  request->blocks.push_back(std::move(block));
  return request;
}

RequestBuilder::Grouped RequestBuilder::group(const TableSpec& spec, std::span<const int64_t> keys,
                                              bool shared) const {
  Grouped grouped;
  grouped.block = allocate(12 * keys.size() + 64, shared);
  if (grouped.block != nullptr) {
    auto* out = reinterpret_cast<int64_t*>(grouped.block->bytes().data());
    grouped.split = std::make_shared<const SplitKeys>(
        split_keys(spec, keys, shards(), out, reinterpret_cast<uint32_t*>(out + keys.size())));
  }
  return grouped;
}

void RequestBuilder::fill_pull_shared(const PullOperation& operation, const Grouped& grouped,
                                      std::span<const uint32_t> frame_shards, Request& request) const {
  request.blocks = {grouped.block, operation.block};
  request.split = grouped.split;
  const SplitKeys& split = *grouped.split;
  const Place keys = Place::of(*grouped.block);
  const Place rows = Place::of(*operation.block);
  const size_t positions = size_t{8} * split.begin.back();
  for (const uint32_t shard : frame_shards) {
    Part part = part_of(*operation.spec, shard, Codec::fp32);
    part.count = split.count(shard);
    part.keys_segment = keys.segment;
    part.keys_at = keys.at(size_t{8} * split.begin[shard]);
    part.positions_at = keys.at(positions + size_t{4} * split.begin[shard]);
    part.positions_end = static_cast<uint32_t>(operation.rows);
    part.values_segment = rows.segment;
    part.values_at = rows.at(0);
    request.parts.push_back(part);
  }
}

bool RequestBuilder::fill_pull_inline(const PullOperation& operation, const Grouped& grouped,
                                      std::span<const uint32_t> frame_shards, Merger& merger,
                                      Request& request) const {
  const SplitKeys& split = *grouped.split;
  size_t count = 0;
  for (const uint32_t shard : frame_shards) count += split.count(shard);
  const auto block = allocate(padded(8 * count) + 12 * count, false);
  if (block == nullptr) return false;
  auto* keys = reinterpret_cast<int64_t*>(block->bytes().data());
  auto* heads = reinterpret_cast<uint32_t*>(block->bytes().data() + padded(8 * count));
  // Copied from the split, which may lie in memory that a server can write: these are followed unchecked.
  const auto last = static_cast<uint32_t>(std::max<size_t>(operation.rows, 1) - 1);
  uint32_t* positions = heads + count;
  uint32_t* before = positions + count;
  size_t distinct = 0;
  uint32_t placed = 0;
  for (const uint32_t shard : frame_shards) {
    Part part = part_of(*operation.spec, shard, operation.codec);
    part.count =
        merger.distinct(split.group(shard), placed, keys + distinct, heads + distinct, before + placed);
    std::transform(split.positions + split.begin[shard], split.positions + split.begin[shard + 1],
                   positions + placed, [last](uint32_t position) { return std::min(position, last); });
    placed += split.count(shard);
    part.keys_at = static_cast<uint32_t>(distinct * 2);
    part.samples = static_cast<uint32_t>(distinct);
    distinct += part.count;
    request.parts.push_back(part);
  }
  request.blocks.push_back(block);
  request.keys = {keys, distinct};
  request.positions = positions;
  request.heads = heads;
  request.before = before;
  request.body_bytes = padded(8 * distinct);
  request.body.push_back(block->bytes().first(request.body_bytes));
  return true;
}

std::shared_ptr<Request> RequestBuilder::pull(const std::shared_ptr<PullOperation>& operation,
                                              const Grouped& grouped, const Frame& frame, bool shm,
                                              Merger& merger) const {
  auto request = std::make_shared<Request>();
  request->operation = operation;
  request->server = frame.server;
  request->header.kind = static_cast<uint16_t>(Kind::pull);
  const bool in_place = shm && operation->block != nullptr && operation->block->segment() != nullptr &&
                        grouped.block->segment() != nullptr;
  if (in_place)
    fill_pull_shared(*operation, grouped, frame.shards, *request);
  else if (!fill_pull_inline(*operation, grouped, frame.shards, merger, *request))
    return nullptr;
  return request;
}

std::vector<RequestBuilder::Frame> RequestBuilder::plan(std::span<const size_t> shard_bytes,
                                                        size_t frame_bytes, bool pulls, size_t items) const {
  const PlacementPtr now = placement();
  std::map<uint32_t, std::vector<Frame>> by_server;
  std::map<uint32_t, size_t> filled;
  size_t longest = 0;
  for (uint32_t shard = 0; shard < shards(); ++shard) {
    if (shard_bytes[shard] == 0) continue;
    const uint32_t server = pulls ? now->pulled_from(shard) : now->head(shard);
    std::vector<Frame>& frames = by_server[server];
    size_t& bytes = filled[server];
    const bool full = bytes >= frame_bytes || bytes + shard_bytes[shard] > kPushBodyBytesMax;
    if (frames.empty() || full || (frames.back().shards.size() + 1) * items > kPushPartsMax) {
      frames.push_back({server, {}});
      bytes = 0;
      longest = std::max(longest, frames.size());
    }
    frames.back().shards.push_back(shard);
    bytes += shard_bytes[shard];
  }
  std::vector<Frame> in_turn;
  for (size_t i = 0; i < longest; ++i) {
    for (auto& [server, frames] : by_server)
      if (i < frames.size()) in_turn.push_back(std::move(frames[i]));
  }
  return in_turn;
}

std::vector<std::vector<std::shared_ptr<Request>>> RequestBuilder::cut(
    std::vector<std::shared_ptr<Request>> requests, size_t body_bytes_max) {
  std::vector<std::vector<std::shared_ptr<Request>>> frames;
  size_t parts = 0, bytes = 0;
  for (auto& request : requests) {
    parts += request->parts.size();
    bytes += request->body_bytes;
    if (frames.empty() || parts > kPartsMax || bytes > body_bytes_max) {
      frames.emplace_back();
      parts = request->parts.size();
      bytes = request->body_bytes;
    }
    frames.back().push_back(std::move(request));
  }
  return frames;
}

std::shared_ptr<Request> RequestBuilder::join(std::vector<std::shared_ptr<Request>> requests) {
  const bool pulls = requests[0]->header.kind == static_cast<uint16_t>(Kind::pull);
  if (requests.size() == 1 && !pulls) return std::move(requests[0]);
  auto whole = std::make_shared<Request>();
  whole->operation = requests[0]->operation;
  whole->server = requests[0]->server;
  whole->header = requests[0]->header;
  size_t rows = 0;
  for (const auto& one : requests) {
    const auto shift = static_cast<uint32_t>(whole->body_bytes / 4);
    for (Part part : one->parts) {
      part.samples += static_cast<uint32_t>(rows);
      if (part.keys_segment == 0) part.keys_at += shift;
      if (part.values_segment == 0) {
        part.values_at += shift;
        part.pulled_at += shift;
      }
      whole->parts.push_back(part);
    }
    rows += one->keys.size();
    whole->body.insert(whole->body.end(), one->body.begin(), one->body.end());
    whole->shared.insert(whole->shared.end(), one->shared.begin(), one->shared.end());
    whole->body_bytes += one->body_bytes;
    whole->blocks.insert(whole->blocks.end(), one->blocks.begin(), one->blocks.end());
  }
  if (pulls) {
    whole->joined = std::move(requests);
  } else {  // one update per shard: its parts stand together
    std::stable_sort(whole->parts.begin(), whole->parts.end(),
                     [](const Part& a, const Part& b) { return a.shard < b.shard; });
  }
  return whole;
}

Part RequestBuilder::push_part(const PushItem& item, uint32_t shard, Codec codec,
                               const PushOptions& options) const {
  Part part = part_of(*item.spec, shard, codec);
  part.mode = static_cast<uint8_t>(options.mode);
  part.lr = item.lr;
  part.version = versions_[shard];
  return part;
}

std::shared_ptr<Request> RequestBuilder::push(const SplitKeys& split, const Frame& frame,
                                              const PushItem& item, const PushOptions& options, bool shm,
                                              Merger& merger, FiniteCheck* check) const {
  const TableSpec& spec = *item.spec;
  const auto dim = static_cast<uint32_t>(spec.dim);
  size_t room = 0;
  for (const uint32_t shard : frame.shards)
    room += padded(8 * split.count(shard)) + padded(4 * size_t{dim} * split.count(shard)) + 64;
  const auto block = allocate(room, shm);
  if (block == nullptr) return nullptr;
  const bool shared = block->segment() != nullptr;
  const Codec codec = shared ? Codec::fp32 : options.wire();
  const auto plain = codec == Codec::fp32 ? nullptr : allocate(4 * split.count_max * dim, false);
  if (codec != Codec::fp32 && plain == nullptr) return nullptr;
  auto request = push_request(frame.server, block, options);
  const Place place = Place::of(*block);
  std::byte* memory = block->bytes().data();
  size_t at = 0;
  for (const uint32_t shard : frame.shards) {
    const std::span<const int64_t> keys = split.group(shard);
    const size_t values_at = at + padded(8 * keys.size());
    auto* keys_out = reinterpret_cast<int64_t*>(memory + at);
    auto* rows = reinterpret_cast<float*>(plain == nullptr ? memory + values_at : plain->bytes().data());
    const uint32_t distinct = merger.merge(options.mode, keys, split.positions + split.begin[shard],
                                           item.values.data(), dim, keys_out, rows);
    if (check != nullptr && check->status.ok()) {
      // By the format asked for, also where shared memory needs none: lanes must not differ in what they
      // take.
      *check = check_finite("push to " + title(spec) + " (duplicates summed)", {keys_out, distinct}, rows,
                            dim, options.wire());
    }
    if (plain != nullptr) encode_rows(codec, rows, distinct, dim, memory + values_at);
    Part part = push_part(item, shard, codec, options);
    part.count = distinct;
    part.keys_segment = part.values_segment = place.segment;
    part.keys_at = place.at(at);
    part.values_at = place.at(values_at);
    request->parts.push_back(part);
    at = values_at + padded(encoded_bytes(codec, dim) * distinct);
  }
  if (shared) {
    request->shared.push_back(block->bytes().first(at));
  } else {
    request->body_bytes = at;
    request->body.push_back(block->bytes().first(at));
  }
  return request;
}

std::shared_ptr<Request> RequestBuilder::push_pieces(const PushItem& item, uint32_t server, uint32_t shard,
                                                     const PushOptions& options, bool shm) const {
  const TableSpec& spec = *item.spec;
  std::vector<int64_t> pieces;
  const uint32_t first = (shard + shards() - shard_of_key(spec, 0, shards())) % shards();
  for (uint32_t piece = first; piece < spec.pieces(); piece += shards()) pieces.push_back(piece);
  const size_t key_bytes = padded(8 * pieces.size());
  const size_t copies = item.dc_lambda != 0.0f ? 2 : 1;
  const size_t piece_bytes = 4 * size_t{spec.floats(0)} + 64;
  const auto block = allocate(key_bytes + copies * (pieces.size() * piece_bytes + 64), shm);
  if (block == nullptr) return nullptr;
  const bool shared = block->segment() != nullptr;
  const Codec codec = shared ? Codec::fp32 : options.wire();
  std::memcpy(block->bytes().data(), pieces.data(), 8 * pieces.size());
  size_t at = key_bytes;
  const auto put = [&](Codec as, std::span<const float> values) {
    for (const int64_t piece : pieces) {
      const uint32_t floats = spec.floats(piece);
      const float* from = values.data() + static_cast<size_t>(piece) * kPieceFloats;
      encode_rows(as, from, 1, floats, block->bytes().data() + at);
      at += encoded_bytes(as, floats);
    }
  };
  put(codec, item.values);
  const size_t pulled_at = padded(at);
  const size_t words = (at - key_bytes + 3) / 4;
  if (copies == 2) {
    at = pulled_at;
    put(Codec::fp32, item.pulled);
  }
  auto request = push_request(server, block, options);
  const Place place = Place::of(*block);
  Part part = push_part(item, shard, codec, options);
  part.count = static_cast<uint32_t>(pieces.size());
  part.values_words = static_cast<uint32_t>(words);
  part.dc_lambda = item.dc_lambda;
  part.pulled_at = copies == 2 ? place.at(pulled_at) : 0;
  part.keys_segment = part.values_segment = place.segment;
  part.keys_at = place.at(0);
  part.values_at = place.at(key_bytes);
  request->parts.push_back(part);
  if (shared) {
    request->shared.push_back(block->bytes().first(padded(at)));
  } else {
    request->body_bytes = padded(at);
    request->body.push_back(block->bytes().first(request->body_bytes));
  }
  return request;
}

bool RequestBuilder::needs_shared_memory(const Request& request) {
  return std::any_of(request.parts.begin(), request.parts.end(),
                     [](const Part& part) { return part.keys_segment != 0 || part.values_segment != 0; });
}

std::shared_ptr<Request> RequestBuilder::in_body(const Request& push) {
  auto request = std::make_shared<Request>(push);
  request->shared.clear();
  std::map<std::pair<uint16_t, uint32_t>, uint32_t> shifts;  // by where each block begins
  for (size_t i = 0, next = 0; i < push.blocks.size(); ++i) {
    const Place place = Place::of(*push.blocks[i]);
    if (place.segment == 0) continue;
    const std::span<const std::byte> arrays = push.shared[next++];
    shifts[{place.segment, place.base}] = static_cast<uint32_t>(request->body_bytes / 4) - place.base;
    request->body.push_back(arrays);
    request->body_bytes += arrays.size();
  }
  for (Part& part : request->parts) {
    if (part.keys_segment == 0) continue;
    const uint32_t shift = std::prev(shifts.upper_bound({part.keys_segment, part.keys_at}))->second;
    part.keys_at += shift;
    part.values_at += shift;
    part.pulled_at += shift;
    part.keys_segment = part.values_segment = 0;
  }
  return request;
}

}  // namespace shoal
