#include "serve/session.h"

#include <cstring>
#include <new>

#include "base/log.h"
#include "base/mutants.h"
#include "net/handshake.h"

namespace shoal {
namespace {

constexpr size_t kSegmentsMax = 1024;
constexpr size_t kSegmentBytesMax = size_t{1} << 36;

}  // namespace

std::shared_ptr<ServerState::Gate> ServerState::gate(uint64_t client) {
  const std::lock_guard lock(gates_mutex_);
  std::shared_ptr<Gate>& gate = gates_[client];
  if (gate == nullptr) gate = std::make_shared<Gate>();
  return gate;
}

void ServerState::leave(uint64_t client, std::shared_ptr<Gate>& gate) {
  const std::lock_guard lock(gates_mutex_);
  gate = nullptr;
  const auto it = gates_.find(client);
  if (it->second.use_count() == 1) gates_.erase(it);  // the shards remember which incarnations are fenced
}

void ServerState::place(uint32_t version, std::span<const ChainPlace> places) {
  const std::lock_guard lock(mutex_);
  placement = 0;  // what is asked while it changes is asked again
  terms_.resize(places.size());
  for (size_t i = 0; i < places.size(); ++i) {
    // A fill that is under way goes on while the shard's own place stays as it is.
    if (terms_[i] == places[i].term) continue;
    terms_[i] = places[i].term;
    const auto number = static_cast<uint16_t>(i);
    const auto tell_chain = [&] {
      chain.place(number, places[i]);
      if (i == 0) chain.place(kSyncLog, places[i]);
    };
    // Nothing may be applied for a server behind that the chain does not know of; what it knows of a server
    // that is gone only waits a little longer.
    if (places[i].next != kNobody) tell_chain();
    const bool left = store.shard(static_cast<uint32_t>(i)).place(places[i]);
    if (places[i].next == kNobody) tell_chain();
    if (left) store.shard(static_cast<uint32_t>(i)).clear();  // not one that is being filled
    if (i == 0 && !places[i].head) sync.turn_away();
  }
  store.placed();
  placement = version;
}

void Session::refuse(const Status& why, ReplySink& sink) {
  phase_ = Phase::closed;
  ++server_.counters.refused;
  log_line("server", "connection refused: " + why.message());
  Header reply;
  reply.kind = static_cast<uint16_t>(Kind::refuse);
  reply.code = static_cast<uint16_t>(why.code());
  sink.send(reply, std::as_bytes(std::span(why.message())));
}

Session::Outcome Session::refuse_and_close(Status why, ReplySink& sink) {
  refuse(why, sink);
  return Outcome::close;
}

Session::Outcome Session::on_frame(const FrameView& frame, ReplySink& sink, std::vector<int>& descriptors) {
  switch (phase_) {
    case Phase::hello: return on_hello(frame, sink);
    case Phase::proof: return on_proof(frame, sink);
    case Phase::open:
      // The library throws one thing that we cannot ask for beforehand. It costs the request that was too
      // much: what was begun of an answer is dropped, and a shard that failed is as it was.
      try {
        return on_request(frame, sink, descriptors);
      } catch (const std::bad_alloc&) {
        progress_ = {};
        return answer(frame, {Code::internal, "the server is out of memory for this request"}, sink);
      }
    case Phase::closed: return Outcome::close;
  }
  return Outcome::close;
}

Session::Outcome Session::on_hello(const FrameView& frame, ReplySink& sink) {
  if (frame.header.kind != static_cast<uint16_t>(Kind::hello) || frame.body.size() < sizeof(Digest))
    return refuse_and_close({Code::refused, "a connection must begin with hello"}, sink);
  std::memcpy(client_nonce_.data(), frame.body.data(), sizeof(Digest));
  server_nonce_ = random_nonce();
  phase_ = Phase::proof;
  Header reply;
  reply.kind = static_cast<uint16_t>(Kind::challenge);
  sink.send(reply, server_nonce_);
  return Outcome::done;
}

Session::Outcome Session::on_proof(const FrameView& frame, ReplySink& sink) {
  const Header& header = frame.header;
  if (header.kind != static_cast<uint16_t>(Kind::proof) || frame.body.size() < sizeof(Digest))
    return refuse_and_close({Code::refused, "a proof of the token must follow hello"}, sink);
  Digest proof;
  std::memcpy(proof.data(), frame.body.data(), sizeof proof);
  const Digest expected =
      client_proof(server_.token, client_nonce_, server_nonce_, header.client, header.incarnation);
  if (!equal_constant_time(proof, expected))
    return refuse_and_close({Code::refused, "the token is wrong"}, sink);
  client_ = header.client;
  gate_ = server_.gate(client_);
  {
    const std::lock_guard lock(gate_->mutex);  // waits for a request that an older connection still runs
    if (header.incarnation < server_.store.incarnation(client_) && !SHOAL_MUTANT(accept_old_incarnation)) {
      return refuse_and_close({Code::fenced, "incarnation " + std::to_string(header.incarnation) +
                                                 " of client " + std::to_string(header.client) +
                                                 " is fenced: a newer one of the same name has connected"},
                              sink);
    }
    server_.store.fence(client_, header.incarnation);
    gate_->session = number_;
  }
  incarnation_ = header.incarnation;
  phase_ = Phase::open;
  ++server_.counters.connections;
  const Digest ours = server_proof(server_.token, client_nonce_, server_nonce_, client_, incarnation_);
  const uint32_t shards = server_.store.shards();
  Header reply;
  reply.kind = static_cast<uint16_t>(Kind::welcome);
  std::vector<std::byte> body(ours.begin(), ours.end());
  body.resize(sizeof ours + sizeof shards);
  std::memcpy(body.data() + sizeof ours, &shards, sizeof shards);
  sink.send(reply, body);
  return Outcome::done;
}

Session::Outcome Session::on_request(const FrameView& frame, ReplySink& sink, std::vector<int>& descriptors) {
  const Header& header = frame.header;
  if (header.client != client_ || header.incarnation != incarnation_) {
    return refuse_and_close({Code::refused, "a frame speaks for client " + std::to_string(header.client) +
                                                " on the connection of client " + std::to_string(client_)},
                            sink);
  }
  const bool pushes = header.kind == static_cast<uint16_t>(Kind::push) ||
                      header.kind == static_cast<uint16_t>(Kind::replicate_push);
  const bool commits = header.kind == static_cast<uint16_t>(Kind::replicate_commit);
  const uint32_t flags = pushes ? uint32_t{kStage | kByStaleness} : commits ? uint32_t{kSettings} : 0;
  if ((header.flags & ~flags) != 0 || header.round != 0 || header.cut != 0) {
    return refuse_and_close(
        {Code::refused, "a frame asks for rounds or cuts, which this server does not know"}, sink);
  }
  const std::lock_guard lock(gate_->mutex);
  if (gate_->session != number_ && !SHOAL_MUTANT(accept_old_incarnation)) {
    // The same client has connected again: this connection is an old one's rest.
    phase_ = Phase::closed;
    return Outcome::close;
  }
  switch (static_cast<Kind>(header.kind)) {
    case Kind::push: return push(frame, sink);
    case Kind::pull: return pull(frame, sink);
    case Kind::scan: return scan(frame, sink);
    case Kind::figures: return figures(frame, sink);
    case Kind::sync: return sync(frame, sink);
    case Kind::commit:
    case Kind::norm: return commit(frame, sink);
    case Kind::replicate_push:
    case Kind::replicate_commit:
    case Kind::replicate_sync:
    case Kind::image:
      if (client_ < kServerClients)
        return refuse_and_close({Code::refused, "only a server sends on what others pushed"}, sink);
      return header.kind == static_cast<uint16_t>(Kind::image) ? image(frame, sink) : replicate(frame, sink);
    case Kind::declare: {
      Result<TableSpec> spec = decode_table(frame.body);
      if (!spec.ok()) return answer(frame, spec.status(), sink);
      const auto before = server_.store.table(spec->id);
      const bool news = before == nullptr || before->generation < spec->generation;
      const Status status = server_.store.declare(std::move(*spec));
      // A server that is being filled may not be known to the client yet. Only news: chains go in circles.
      if (status.ok() && news && server_.chain.in_use()) server_.chain.declare(frame.body);
      try_early();
      return answer(frame, status, sink);
    }
    case Kind::goodbye:
      // No connection of this incarnation is heard any more, so nobody will ask about its pushes. That those
      // before it are fenced is kept.
      gate_->session = 0;
      server_.store.forget(client_, incarnation_);
      phase_ = Phase::closed;
      return Outcome::close;
    case Kind::segment:
      if (Status status = add_segment(frame, descriptors); !status.ok())
        return refuse_and_close(std::move(status), sink);
      return Outcome::done;
    case Kind::segment_gone: segments_.erase(static_cast<uint32_t>(header.request)); return Outcome::done;
    default:
      return refuse_and_close(
          {Code::refused, "frames of kind " + std::to_string(header.kind) + " are not taken from a client"},
          sink);
  }
}

Status Session::add_segment(const FrameView& frame, std::vector<int>& descriptors) {
  const uint64_t id = frame.header.request;
  if (descriptors.empty()) return {Code::refused, "a segment was announced without its descriptor"};
  Fd fd(descriptors.front());
  descriptors.erase(descriptors.begin());
  if (id == 0 || id > 0xffff || segments_.size() >= kSegmentsMax) {
    return {Code::refused, "segment ids are 1..65535, and at most " + std::to_string(kSegmentsMax) +
                               " of them; this is " + std::to_string(id)};
  }
  Result<std::shared_ptr<Segment>> segment =
      Segment::adopt(static_cast<uint32_t>(id), fd.release(), kSegmentBytesMax);
  if (!segment.ok()) return segment.status();
  segments_[static_cast<uint32_t>(id)] = std::move(*segment);
  return {};
}

}  // namespace shoal
