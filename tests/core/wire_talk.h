// The client's side of a conversation with a Session, without sockets: frames are built and fed as bytes,
// replies are collected. For tests of the protocol and for the fuzzer; it lets a test say what no client
// of ours would.
#pragma once

#include <cassert>
#include <cstddef>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "net/handshake.h"
#include "serve/session.h"
#include "serve/sync_desk.h"
#include "wire/frame.h"

namespace shoal {

using Bytes = std::vector<std::byte>;

inline Bytes bytes_of(const std::string& text) {
  const auto* data = reinterpret_cast<const std::byte*>(text.data());
  return {data, data + text.size()};
}

inline Bytes make_frame(const Header& header, std::span<const Part> parts = {},
                        std::span<const std::byte> body = {}) {
  Bytes frame = encode_head(header, parts, body.size());
  frame.insert(frame.end(), body.begin(), body.end());
  return frame;
}

struct Reply {
  Header header;
  std::vector<Part> parts;
  Bytes body;

  Kind kind() const { return static_cast<Kind>(header.kind); }
  Code code() const { return static_cast<Code>(header.code); }
  std::string text() const { return {reinterpret_cast<const char*>(body.data()), body.size()}; }
};

class CollectingSink : public ReplySink {
 public:
  std::vector<Reply> replies;
  size_t room_replies = std::numeric_limits<size_t>::max();  // more than these must wait

  bool room() const override { return replies.size() < room_replies; }
  Draft begin(size_t parts, size_t body_bytes) override {
    draft_.parts.assign(parts, Part{});
    draft_.body.assign(body_bytes + 1, std::byte{0});  // one more: data() is then never null
    return {draft_.parts.data(), draft_.body.data()};
  }
  void finish(Header header) override {
    draft_.header = header;
    draft_.body.pop_back();
    encode_head(header, draft_.parts, draft_.body.size());  // what a connection would send must be a frame
    replies.push_back(std::exchange(draft_, Reply{}));
  }

 private:
  Reply draft_;
};

// One connection: what ServerConnection does, but for the socket.
class Talk {
 public:
  static constexpr size_t frame_bytes_max = size_t{1} << 20;

  explicit Talk(ServerState& server) : session_(server, std::make_shared<Mailbox>([] {})) {}
  Talk(const Talk&) = delete;
  Talk& operator=(const Talk&) = delete;
  ~Talk() {
    for (const int fd : descriptors) {
      close(fd);
    }
  }

  CollectingSink sink;
  std::vector<int> descriptors;
  uint64_t client = 7;
  uint32_t incarnation = 1;
  uint32_t member_term = 0;  // the placement that it knows

  bool open() const { return open_; }
  bool proved() const { return session_.proved(); }

  // Hands over bytes, at most `chunk` at a time, and answers the frames among them.
  void feed(std::span<const std::byte> bytes, size_t chunk = std::numeric_limits<size_t>::max()) {
    while (open_ && !bytes.empty()) {
      const std::span<std::byte> want = reader_.want();
      const size_t count = std::min({want.size(), bytes.size(), chunk});
      std::memcpy(want.data(), bytes.data(), count);
      reader_.commit(count);
      bytes = bytes.subspan(count);
      answer();
    }
  }

  // Sends one frame that says who we are; gives the last reply.
  Reply ask(Kind kind, std::span<const Part> parts = {}, std::span<const std::byte> body = {},
            uint64_t seq = 0, uint64_t low = 0, uint32_t flags = 0) {
    Header header;
    header.flags = flags;
    header.kind = static_cast<uint16_t>(kind);
    header.client = client;
    header.incarnation = incarnation;
    header.request = ++requests_;
    header.seq = seq;
    header.low = low;
    header.member_term = member_term;
    sink.replies.clear();
    feed(make_frame(header, parts, body));
    return sink.replies.empty() ? Reply{} : sink.replies.back();
  }

  Reply hello() { return ask(Kind::hello, {}, nonce_); }

  Reply prove(std::span<const std::byte> token, const Reply& challenge) {
    Digest theirs{};
    std::memcpy(theirs.data(), challenge.body.data(), std::min(sizeof theirs, challenge.body.size()));
    return ask(Kind::proof, {}, client_proof(token, nonce_, theirs, client, incarnation));
  }

  // The whole handshake; true where the server welcomed us.
  bool greet(const std::string& token) { return prove(bytes_of(token), hello()).kind() == Kind::welcome; }

 private:
  void answer() {
    while (open_) {
      Result<std::optional<FrameView>> next = reader_.next();
      if (!next.ok()) {
        session_.refuse(next.status(), sink);
        open_ = false;
        return;
      }
      if (!*next) {
        return;
      }
      Session::Outcome outcome = Session::Outcome::later;
      while (outcome == Session::Outcome::later) {
        outcome = session_.on_frame(**next, sink, descriptors);
        sink.room_replies = sink.replies.size() + 1;  // room comes one reply at a time, once asked for
      }
      sink.room_replies = std::numeric_limits<size_t>::max();
      open_ = outcome != Session::Outcome::close;
      if (session_.proved()) {
        reader_.set_body_bytes_max(frame_bytes_max);
      }
    }
  }

  Session session_;
  FrameReader reader_{kHandshakeBodyMax};
  const Digest nonce_{};
  uint64_t requests_ = 0;
  bool open_ = true;
};

inline TableSpec make_table(uint32_t id, uint64_t dim, bool dense = false) {
  TableSpec spec;
  spec.id = id;
  spec.name = "table" + std::to_string(id);
  spec.dim = dim;
  spec.dense = dense;
  spec.optimizer.kind = OptimizerKind::sgd;
  spec.optimizer.lr = 1.0f;
  spec.init.salt = mix64(spec.seed ^ hash_name(spec.name));
  return spec;
}

}  // namespace shoal
