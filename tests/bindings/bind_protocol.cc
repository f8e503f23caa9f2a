// The protocol's state machines, for drivers other than the epoll one: the simulator in tests feeds them
// frame by frame, as `_core.protocol`.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "base/hash.h"
#include "base/mutants.h"
#include "base/sha256.h"
#include "convert.h"
#include "net/handshake.h"
#include "serve/client_protocol.h"
#include "serve/fill.h"
#include "serve/hold.h"
#include "serve/request_builder.h"
#include "serve/session.h"
#include "store/store.h"

namespace nb = nanobind;
using namespace shoal;

namespace {

using Bytes = std::vector<std::byte>;

constexpr size_t kBodyMax = size_t{1} << 30;

nb::bytes to_python(const Bytes& bytes) {
  return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

// Reads `bytes` and hands what `next` gives, frames and errors, to `take_frame` until that gives false.
void each_frame(FrameReader& reader, const nb::bytes& bytes,
                const std::function<bool(Result<std::optional<FrameView>>)>& take_frame) {
  const Bytes copy = to_bytes(bytes);
  std::span<const std::byte> left = copy;
  for (;;) {
    Result<std::optional<FrameView>> next = reader.next();
    if (!next.ok() || *next) {
      if (!take_frame(std::move(next))) return;
      continue;
    }
    if (left.empty()) return;
    const std::span<std::byte> want = reader.want();
    const size_t n = std::min(want.size(), left.size());
    std::memcpy(want.data(), left.data(), n);
    reader.commit(n);
    left = left.subspan(n);
  }
}

// Collects reply frames one by one.
class FrameList : public ReplySink {
 public:
  bool room() const override { return true; }
  Draft begin(size_t parts, size_t body_bytes) override {
    parts_.assign(parts, Part{});
    body_.assign(body_bytes, std::byte{});
    return {parts_.data(), body_.data()};
  }
  void finish(Header header) override {
    Bytes frame = encode_head(header, parts_, body_.size());
    frame.insert(frame.end(), body_.begin(), body_.end());
    frames.push_back(std::move(frame));
  }

  std::vector<Bytes> frames;

 private:
  std::vector<Part> parts_;
  Bytes body_;
};

Bytes frame_of(const Request& request) {
  Bytes frame = encode_head(request.header, request.parts, request.body_bytes);
  for (const auto piece : request.body) frame.insert(frame.end(), piece.begin(), piece.end());
  return frame;
}

struct SimServer {
  SimServer(uint32_t shards, const nb::bytes& token, bool placed, bool weak)
      : state(std::make_shared<ServerState>(shards, to_bytes(token), 0, weak)) {
    for (uint32_t s = 0; s < shards && !placed; ++s) state->store.shard(s).unplace();
  }

  // Answers that waited and are ready: (number of the session, frame).
  nb::list mail() const {
    nb::list frames;
    for (const Mailbox::Mail& mail : mailbox->take()) {
      Bytes frame = encode_head(mail.header, mail.parts, mail.body.size());
      frame.insert(frame.end(), mail.body.begin(), mail.body.end());
      frames.append(nb::make_tuple(mail.session, to_python(frame)));
    }
    return frames;
  }

  // What server.cc and its chain driver do.
  void place(uint32_t index, const Placement& placement) {
    if (placement.version <= state->placement) return;
    me = index;
    state->chain.introduce(index, 1, placement.servers.size());
    state->place(placement.version, placement.places_of(index));
  }
  nb::bytes hello() const { return to_python(small_frame(Kind::hello, kServerClients + me, 1, Digest{})); }
  nb::bytes proof(const nb::bytes& token, const nb::bytes& challenge) const {
    Digest theirs{};
    if (challenge.size() >= sizeof(Header) + sizeof theirs)
      std::memcpy(theirs.data(), challenge.c_str() + sizeof(Header), sizeof theirs);
    const Digest proof = client_proof(to_bytes(token), Digest{}, theirs, kServerClients + me, 1);
    return to_python(small_frame(Kind::proof, kServerClients + me, 1, proof));
  }
  nb::list outgoing(uint32_t server) const {
    nb::list frames;
    while (const auto request = state->chain.next_to_send(server))
      frames.append(to_python(frame_of(*request)));
    return frames;
  }
  void incoming(uint32_t server, const nb::bytes& bytes) const {
    FrameReader reader(kBodyMax);
    each_frame(reader, bytes, [&](const Result<std::optional<FrameView>>& next) {
      state->chain.on_reply(server, **next);
      return true;
    });
  }
  // All that a shard is, to be compared with its copies: its head, and (table, key, meta, row) in order.
  nb::tuple image(uint32_t number) const {
    Shard& shard = state->store.shard(number);
    const Shard::ImageHead head = shard.begin_image();
    nb::list rows;
    for (;;) {
      const ImagePage page = take(shard.read_image(head.id, size_t{1} << 30));
      if (page.keys.empty()) break;
      const size_t floats = page.rows.size() / page.keys.size();
      for (size_t i = 0; i < page.keys.size(); ++i)
        rows.append(
            nb::make_tuple(page.table, page.keys[i],
                           nb::bytes(reinterpret_cast<const char*>(&page.metas[i]), sizeof(RowMeta)),
                           nb::bytes(reinterpret_cast<const char*>(&page.rows[i * floats]), 4 * floats)));
    }
    shard.end_image(head.id);
    return nb::make_tuple(to_python(head.bytes), rows);
  }

  uint32_t me = 0;

  std::shared_ptr<ServerState> state;
  std::shared_ptr<Mailbox> mailbox = std::make_shared<Mailbox>([] {});
};

// A fill by the server's thread. `step`: the code of its status.
struct SimFill {
  SimFill(const SimServer& server, uint32_t shard, uint32_t target, uint32_t term)
      : state(server.state), filler(*state, shard, target, term) {}
  int step() { return static_cast<int>(filler.step().code()); }

  std::shared_ptr<ServerState> state;
  Filler filler;
};

// Any request; keeps the last answer's body.
struct Question : public ClientOperation {
  Status on_reply(const Request& /*request*/, const FrameView& frame) override {
    answer = Bytes(frame.body.begin(), frame.body.end());
    return {};
  }
  Bytes answer;
};

// A server's side of one connection. The reader sees one frame per call, as the network delivers it.
class SimSession {
 public:
  explicit SimSession(const SimServer& server) : state_(server.state), session_(*state_, server.mailbox) {}
  uint64_t number() const { return session_.number(); }

  nb::tuple feed(const nb::bytes& bytes) {
    reader_.set_body_bytes_max(session_.proved() ? kBodyMax : kHandshakeBodyMax);
    FrameList sink;
    std::vector<int> descriptors;
    bool open = true;
    each_frame(reader_, bytes, [&](const Result<std::optional<FrameView>>& next) {
      if (!next.ok()) session_.refuse(next.status(), sink);
      open = next.ok() && session_.on_frame(**next, sink, descriptors) != Session::Outcome::close;
      return open;
    });
    nb::list frames;
    for (const Bytes& frame : sink.frames) frames.append(to_python(frame));
    return nb::make_tuple(frames, open);
  }

  bool proved() const { return session_.proved(); }

 private:
  std::shared_ptr<ServerState> state_;
  Session session_;
  FrameReader reader_{kHandshakeBodyMax};
};

// What a simulator looks at in a frame: (kind, code, seq, low).
nb::tuple head(const nb::bytes& frame) {
  Header header;
  if (frame.size() < sizeof header) throw nb::value_error("a frame has at least a header");
  std::memcpy(&header, frame.c_str(), sizeof header);
  return nb::make_tuple(header.kind, header.code, header.seq, header.low);
}

// A client's machine, its requests as bytes.
class SimClient {
 public:
  SimClient(uint64_t client, uint32_t incarnation, size_t servers, std::vector<uint32_t> placement)
      : client_(client),
        incarnation_(incarnation),
        builder_(alone(servers, placement), nullptr, make_heap_arena(1 << 20)),
        protocol_(client, incarnation, builder_) {}

  nb::bytes hello() { return to_python(small_frame(Kind::hello, client_, incarnation_, nonce_)); }

  nb::bytes proof(const nb::bytes& token, const nb::bytes& challenge) {
    Digest theirs{};
    if (challenge.size() >= sizeof(Header) + sizeof theirs)
      std::memcpy(theirs.data(), challenge.c_str() + sizeof(Header), sizeof theirs);
    const Digest proof = client_proof(to_bytes(token), nonce_, theirs, client_, incarnation_);
    return to_python(small_frame(Kind::proof, client_, incarnation_, proof));
  }

  nb::bytes declare(TableSpec spec) {
    spec.init.salt = mix64(spec.seed ^ hash_name(spec.name));
    tables_[spec.id] = std::make_shared<TableSpec>(spec);
    return to_python(small_frame(Kind::declare, client_, incarnation_, encode_table(spec)));
  }

  // The number of the operation, or 0 where 256 pushes are open.
  uint64_t push(uint32_t table, const nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig>& keys,
                const nb::ndarray<const float, nb::ndim<2>, nb::c_contig>& grads, int64_t stage_rank,
                uint64_t step) {
    const TableSpec& spec = *tables_.at(table);
    const auto operation = std::make_shared<ClientOperation>();
    if (!machine_.begin(*operation, true)) return 0;
    const auto grouped = builder_.group(spec, {keys.data(), keys.size()}, false);
    const PushItem item{
        .table = table, .values = {grads.data(), grads.size()}, .lr = NAN, .spec = tables_.at(table)};
    const PushOptions options{.step = step, .stage_rank = stage_rank};
    for (const auto& frame :
         builder_.plan(shard_bytes(*grouped.split, 4 * spec.dim + 8), kPushFrameBytes, false)) {
      auto request = builder_.push(*grouped.split, frame, item, options, false, merger_, nullptr);
      request->operation = operation;
      protocol_.submit(std::move(request));
    }
    machine_.seal(*operation);
    operations_[++last_] = operation;
    return last_;
  }

  uint64_t pull(uint32_t table, const nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig>& keys) {
    const auto operation = std::make_shared<PullOperation>();
    operation->spec = tables_.at(table);
    operation->rows = keys.size();
    operation->row_floats = operation->spec->dim;
    operation->block = builder_.allocate(4 * keys.size() * operation->spec->dim, false);
    operation->out = reinterpret_cast<float*>(operation->block->bytes().data());
    machine_.begin(*operation, false);
    const auto grouped = builder_.group(*operation->spec, {keys.data(), keys.size()}, false);
    const auto bytes = shard_bytes(*grouped.split, 4 * operation->row_floats + 8);
    for (const auto& frame : builder_.plan(bytes, kPullFrameBytes, true))
      protocol_.submit(builder_.pull(operation, grouped, frame, false, merger_));
    machine_.seal(*operation);
    operations_[++last_] = operation;
    return last_;
  }

  uint64_t ask(uint16_t kind, const std::vector<uint32_t>& servers, const nb::bytes& body) {
    const auto operation = std::make_shared<Question>();
    machine_.begin(*operation, false);
    for (const uint32_t server : servers) {
      auto request = std::make_shared<Request>();
      request->operation = operation;
      request->server = server;
      request->header.kind = kind;
      request->header.member_term = builder_.placement()->version;
      request->blocks.push_back(builder_.allocate(body.size(), false));
      std::memcpy(request->blocks[0]->bytes().data(), body.c_str(), body.size());
      request->body.push_back(request->blocks[0]->bytes().first(body.size()));
      request->body_bytes = body.size();
      protocol_.submit(std::move(request));
    }
    machine_.seal(*operation);
    operations_[++last_] = operation;
    return last_;
  }

  nb::bytes answer(uint64_t number) const {
    return to_python(dynamic_cast<const Question&>(*operations_.at(number)).answer);
  }

  nb::list outgoing(uint32_t server) {
    nb::list frames;
    while (const auto request = machine_.next_to_send(server)) frames.append(to_python(frame_of(*request)));
    return frames;
  }

  void incoming(uint32_t server, const nb::bytes& bytes) {
    each_frame(reader_, bytes, [&](const Result<std::optional<FrameView>>& next) {
      const FrameView frame = *take(next);
      if (const auto request = protocol_.heard(server, frame))
        protocol_.taken(*request, frame, request->operation->on_reply(*request, frame));
      return true;
    });
  }

  void set_placement(const Placement& placement) {
    if (protocol_.set_placement(placement)) protocol_.send_homeless();
  }
  nb::tuple taken_over(uint16_t shard, uint32_t term, uint64_t version, uint64_t entry) {
    const Loss loss = protocol_.taken_over(shard, {.term = term, .version = version, .entry = entry});
    return nb::make_tuple(loss.version, loss.pushes);
  }

  // What its pulse does with orders; times are seconds. The last moment to be still:
  double told(uint32_t number, double now) {
    release();
    order_.told(number, HoldOrder::Time(seconds(now)));
    gate_.hold();
    return seconds_of(order_.still_by());
  }
  bool still() const { return gate_.still(machine_); }
  double kept() {
    order_.kept();
    return seconds_of(order_.until());
  }
  void not_still() { gate_.release(); }
  bool holds(uint32_t number) const { return order_.holds(number); }
  void release() {
    if (order_.end()) gate_.release();
  }
  bool may_push() const { return gate_.may_push(); }

  bool send_homeless() { return !protocol_.send_homeless().empty(); }
  bool homeless() const { return protocol_.homeless(); }
  void lost(uint32_t server) { machine_.lost(server); }
  bool done(uint64_t number) const { return operations_.at(number)->done(); }
  int code(uint64_t number) const { return static_cast<int>(operations_.at(number)->status().code()); }
  size_t open() const { return machine_.operations_open(); }
  bool waits_for(uint32_t server) const { return machine_.has_open(server); }
  uint64_t low() const { return machine_.low(); }
  uint64_t retries() const { return machine_.retries(); }

  nb::object rows(uint64_t number) const {
    const auto& operation = operations_.at(number);
    nb::object array = nb::module_::import_("numpy").attr("empty")(
        nb::make_tuple(operation->rows, operation->row_floats), "float32");
    std::memcpy(nb::cast<nb::ndarray<float>>(array).data(), operation->out,
                4 * operation->rows * operation->row_floats);
    return array;
  }

 private:
  static std::chrono::nanoseconds seconds(double s) {
    return std::chrono::nanoseconds(static_cast<int64_t>(s * 1e9));
  }
  static double seconds_of(HoldOrder::Time time) {
    return std::chrono::duration<double>(time.time_since_epoch()).count();
  }
  static std::shared_ptr<const Placement> alone(size_t servers, const std::vector<uint32_t>& placement) {
    auto made = std::make_shared<Placement>();
    for (uint32_t i = 0; i < servers; ++i)
      made->servers.push_back({.index = i, .host = "sim", .port = 1, .unix_path = ""});
    for (const uint32_t server : placement) made->shards.push_back({.term = 1, .chain = {server}});
    return made;
  }

  const uint64_t client_;
  const uint32_t incarnation_;
  const Digest nonce_{};  // simulated runs replay from a seed: nothing in them is random by itself
  RequestBuilder builder_;
  ClientProtocol protocol_;
  ClientMachine& machine_ = protocol_.machine();
  PushGate gate_;
  HoldOrder order_;
  Merger merger_;
  FrameReader reader_{kBodyMax};
  std::map<uint32_t, std::shared_ptr<const TableSpec>> tables_;
  std::map<uint64_t, std::shared_ptr<ClientOperation>> operations_;
  uint64_t last_ = 0;
};

nb::object key_shards(const nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& keys,
                      uint32_t shards) {
  nb::object array = nb::module_::import_("numpy").attr("empty")(keys.size(), "uint16");
  auto* out = nb::cast<nb::ndarray<uint16_t>>(array).data();
  for (size_t i = 0; i < keys.size(); ++i) {
    const uint64_t hash = mix64(static_cast<uint64_t>(keys.data()[i]));
    out[i] = static_cast<uint16_t>(shard_of_hash(hash, shards));
  }
  return array;
}

void bind_hold(nb::class_<SimClient>& client) {
  using namespace nb::literals;
  client.def("told", &SimClient::told, "number"_a, "now"_a)
      .def("still", &SimClient::still)
      .def("kept", &SimClient::kept)
      .def("not_still", &SimClient::not_still)
      .def("holds", &SimClient::holds, "number"_a)
      .def("release", &SimClient::release)
      .def("may_push", &SimClient::may_push);
}

}  // namespace

void bind_protocol(nb::module_& parent) {
  using namespace nb::literals;
  nb::module_ m = parent.def_submodule("protocol", "The protocol's state machines, for simulators.");
  nb::class_<SimServer>(m, "Server")
      .def(nb::init<uint32_t, const nb::bytes&, bool, bool>(), "shards"_a, "token"_a, "placed"_a = true,
           "weak"_a = false)
      .def("mail", &SimServer::mail)
      .def("place", &SimServer::place, "index"_a, "placement"_a)
      .def("hello", &SimServer::hello)
      .def("proof", &SimServer::proof, "token"_a, "challenge"_a)
      .def("outgoing", &SimServer::outgoing, "server"_a)
      .def("incoming", &SimServer::incoming, "server"_a, "frame"_a)
      .def("has_open",
           [](const SimServer& self, uint32_t server) { return self.state->chain.has_open(server); })
      .def("lost", [](const SimServer& self, uint32_t server) { self.state->chain.lost(server); })
      .def("gone", [](const SimServer& self, uint32_t server) { self.state->chain.gone(server); })
      .def("image", &SimServer::image, "shard"_a)
      .def(
          "store",
          [](const SimServer& self) {
            return LocalStore{&self.state->store, &self.state->sync, &self.state->chain};
          },
          nb::keep_alive<0, 1>())
      .def("sync_image", [](const SimServer& self) { return to_python(self.state->sync.image(true).bytes); })
      .def("counters", [](const SimServer& self) {
        const ServerCounters& c = self.state->counters;
        return counts({{"pushes", c.pushes}, {"duplicates", c.duplicates}, {"refused", c.refused}});
      });
  nb::class_<SimFill>(m, "Fill")
      .def(nb::init<const SimServer&, uint32_t, uint32_t, uint32_t>(), "server"_a, "shard"_a, "target"_a,
           "term"_a)
      .def("step", &SimFill::step);
  nb::class_<SimSession>(m, "Session")
      .def(nb::init<const SimServer&>(), "server"_a)
      .def("feed", &SimSession::feed, "frame"_a)
      .def("number", &SimSession::number)
      .def("proved", &SimSession::proved);
  nb::class_<SimClient> client(m, "Client");
  bind_hold(client);
  client
      .def(nb::init<uint64_t, uint32_t, size_t, std::vector<uint32_t>>(), "client"_a, "incarnation"_a,
           "servers"_a, "placement"_a)
      .def("hello", &SimClient::hello)
      .def("proof", &SimClient::proof, "token"_a, "challenge"_a)
      .def("declare", &SimClient::declare, "spec"_a)
      .def("push", &SimClient::push, "table"_a, "keys"_a, "grads"_a, "stage_rank"_a = -1, "step"_a = 0)
      .def("pull", &SimClient::pull, "table"_a, "keys"_a)
      .def("ask", &SimClient::ask, "kind"_a, "servers"_a, "body"_a)
      .def("answer", &SimClient::answer, "operation"_a)
      .def("outgoing", &SimClient::outgoing, "server"_a)
      .def("incoming", &SimClient::incoming, "server"_a, "frame"_a)
      .def("set_placement", &SimClient::set_placement, "placement"_a)
      .def("taken_over", &SimClient::taken_over, "shard"_a, "term"_a, "version"_a, "entry"_a)
      .def("send_homeless", &SimClient::send_homeless)
      .def("homeless", &SimClient::homeless)
      .def("lost", &SimClient::lost, "server"_a)
      .def("done", &SimClient::done, "operation"_a)
      .def("code", &SimClient::code, "operation"_a)
      .def("open", &SimClient::open)
      .def("waits_for", &SimClient::waits_for, "server"_a)
      .def("low", &SimClient::low)
      .def("retries", &SimClient::retries)
      .def("rows", &SimClient::rows, "operation"_a);
  m.def("head", &head, "frame"_a);
  m.def("key_shards", &key_shards, "keys"_a, "shards"_a);
#ifdef SHOAL_MUTANTS
  m.def("set_mutant", [](const std::string& name) { mutant = name; }, "name"_a);
#endif
}
