#include "serve/link.h"

#include <poll.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cassert>
#include <cerrno>
#include <cstring>

#include "base/sha256.h"
#include "net/handshake.h"
#include "net/socket.h"

namespace shoal {
namespace {

constexpr size_t kSegmentsPerLink = 512;  // half of what a server takes
constexpr int kSocketBufferBytes = 4 * 1024 * 1024;

int ms_until(Link::Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Link::Clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count() + 1, 0, 60'000));
}

Result<Fd> connect_by(const ServerAddress& address, Lane lane, Link::Clock::time_point deadline) {
  if (lane == Lane::tcp) return connect_tcp(address.host, address.port, ms_until(deadline));
  if (address.unix_path.empty()) return Status{Code::unavailable, "it has no unix socket"};
  return connect_unix(address.unix_path, ms_until(deadline));
}

}  // namespace

const char* lane_name(Lane lane) {
  switch (lane) {
    case Lane::memory: return "memory";
    case Lane::shm: return "shm";
    case Lane::unix_socket: return "unix";
    case Lane::tcp: return "tcp";
  }
  return "?";
}

std::string ServerAddress::name() const {
  return "server " + std::to_string(index) + " (" + host + ":" + std::to_string(port) + ")";
}

Result<std::unique_ptr<Link>> Link::dial(const ServerAddress& address, std::optional<Lane> wanted,
                                         const ClientIdentity& identity, Clock::time_point deadline) {
  Lane lane = wanted.value_or(Lane::shm);
  Result<Fd> socket = connect_by(address, lane, deadline);
  if (!socket.ok() && !wanted) {
    lane = Lane::tcp;  // another host, or another user's server
    socket = connect_by(address, lane, deadline);
  }
  if (!socket.ok()) return Status{socket.status().code(), address.name() + ": " + socket.status().message()};
  if (lane != Lane::tcp) set_buffers(socket->get(), kSocketBufferBytes);  // tcp tunes its own, and better
  auto stream =
      lane == Lane::tcp ? make_tcp_stream(std::move(*socket)) : make_unix_stream(std::move(*socket));
  auto link = std::make_unique<Link>(std::move(stream), lane);
  if (Status status = link->handshake(identity, deadline); !status.ok())
    return Status{status.code(), address.name() + ": " + status.message()};
  return link;
}

Status Link::send_all(std::span<const std::byte> bytes, Clock::time_point deadline) {
  while (!bytes.empty()) {
    const iovec piece{const_cast<std::byte*>(bytes.data()), bytes.size()};
    const ssize_t sent = stream_->write({&piece, 1}, -1);
    if (sent >= 0) {
      bytes = bytes.subspan(static_cast<size_t>(sent));
      continue;
    }
    if (errno != EAGAIN) return {Code::unavailable, std::string("lost while greeting: ") + strerror(errno)};
    pollfd wait{fd(), POLLOUT, 0};
    if (Clock::now() >= deadline || poll(&wait, 1, ms_until(deadline)) == 0)
      return {Code::timeout, "did not take our greeting in time"};
  }
  return {};
}

Result<FrameView> Link::receive_one(Clock::time_point deadline) {
  for (;;) {
    Result<std::optional<FrameView>> next = reader_.next();
    if (!next.ok()) return next.status();
    if (*next) return **next;
    const std::span<std::byte> want = reader_.want();
    const ssize_t got = read(want);
    if (got > 0) {
      reader_.commit(static_cast<size_t>(got));
      continue;
    }
    if (got == 0 || errno != EAGAIN) return Status{Code::unavailable, "closed the connection while greeting"};
    pollfd wait{fd(), POLLIN, 0};
    if (Clock::now() >= deadline || poll(&wait, 1, ms_until(deadline)) == 0)
      return Status{Code::timeout, "did not answer our greeting in time"};
  }
}

Status Link::handshake(const ClientIdentity& identity, Clock::time_point deadline) {
  const auto exchange = [&](Kind kind, const Digest& body, Kind expected) -> Result<FrameView> {
    std::array<std::byte, 64> padded{};
    std::copy(body.begin(), body.end(), padded.begin());
    const auto bytes = small_frame(kind, identity.client, identity.incarnation, padded);
    const Status sent = send_all(bytes, deadline);
    Result<FrameView> reply = receive_one(deadline);  // also where it has hung up: it may have said why
    if (!sent.ok() && (!reply.ok() || reply->header.kind != static_cast<uint16_t>(Kind::refuse))) return sent;
    if (!reply.ok()) return reply.status();
    const auto got = static_cast<Kind>(reply->header.kind);
    if (got == Kind::refuse) {
      const std::string text(reinterpret_cast<const char*>(reply->body.data()), reply->body.size());
      return Status{static_cast<Code>(reply->header.code), "refused us: " + text.substr(0, text.find('\0'))};
    }
    if (got != expected || reply->body.size() < sizeof(Digest))
      return Status{Code::refused, "does not speak Shoal's greeting"};
    return *reply;
  };
  const Digest ours = random_nonce();
  const Result<FrameView> challenge = exchange(Kind::hello, ours, Kind::challenge);
  if (!challenge.ok()) return challenge.status();
  Digest theirs;
  std::memcpy(theirs.data(), challenge->body.data(), sizeof theirs);
  const Digest proof = client_proof(identity.token, ours, theirs, identity.client, identity.incarnation);
  const Result<FrameView> welcome = exchange(Kind::proof, proof, Kind::welcome);
  if (!welcome.ok()) return welcome.status();
  Digest answer;
  std::memcpy(answer.data(), welcome->body.data(), sizeof answer);
  if (!equal_constant_time(
          answer, server_proof(identity.token, ours, theirs, identity.client, identity.incarnation))) {
    return {Code::refused, "could not prove that it knows the token"};
  }
  uint32_t shards = 0;
  if (welcome->body.size() >= sizeof(Digest) + sizeof shards)
    std::memcpy(&shards, welcome->body.data() + sizeof(Digest), sizeof shards);
  if (shards != identity.shards) {
    return {Code::mismatch, "has " + std::to_string(shards) + " shards; the placement names " +
                                std::to_string(identity.shards)};
  }
  return {};
}

void Link::fail(Status status) {
  const std::lock_guard lock(failure_mutex_);
  failure_ = std::move(status);
}

Status Link::failure() const {
  const std::lock_guard lock(failure_mutex_);
  return failure_;
}

// A server has no descriptors to give: a connection that brings some is none of ours.
ssize_t Link::read(std::span<std::byte> buffer) {
  std::vector<int> unwanted;
  const ssize_t got = stream_->read(buffer, unwanted);
  for (const int descriptor : unwanted) close(descriptor);
  return got;
}

void Link::goodbye(const ClientIdentity& identity) {
  if (!pieces_.empty()) return;  // in the middle of a frame
  const auto bytes = small_frame(Kind::goodbye, identity.client, identity.incarnation, {});
  const iovec piece{const_cast<std::byte*>(bytes.data()), bytes.size()};
  [[maybe_unused]] const ssize_t sent = stream_->write({&piece, 1}, -1);
}

Link::Progress Link::send_current() {
  while (piece_ < pieces_.size()) {
    std::array<iovec, 32> vectors;
    size_t count = 0;
    for (size_t i = piece_; i < pieces_.size() && count < vectors.size(); ++i, ++count) {
      const size_t skip = i == piece_ ? offset_ : 0;
      vectors[count] = {const_cast<std::byte*>(pieces_[i].data()) + skip, pieces_[i].size() - skip};
    }
    const ssize_t sent = stream_->write(std::span(vectors.data(), count), attach_);
    if (sent < 0) {
      if (errno == EAGAIN) return Progress::blocked;
      fail({Code::unavailable, std::string("lost while sending: ") + strerror(errno)});
      return Progress::broken;
    }
    attach_ = -1;
    bytes_sent += static_cast<uint64_t>(sent);
    auto left = static_cast<size_t>(sent);
    while (left > 0) {
      const size_t taken = std::min(left, pieces_[piece_].size() - offset_);
      offset_ += taken;
      left -= taken;
      if (offset_ == pieces_[piece_].size()) {
        ++piece_;
        offset_ = 0;
      }
    }
  }
  pieces_.clear();
  piece_ = 0;
  return Progress::moved;
}

// A segment that the arena has unmapped need not stay mapped at the server.
void Link::forget_gone_segments() {
  std::erase_if(announced_, [&](const auto& entry) {
    if (!entry.second.expired()) return false;
    to_announce_.emplace_back(entry.first, -1);
    return true;
  });
}

Link::Progress Link::send(const std::function<std::shared_ptr<Request>()>& next) {
  Progress progress = Progress::idle;
  for (;;) {
    if (!pieces_.empty()) {
      progress = send_current();
      if (progress != Progress::moved) return progress;
    }
    if (!head_pending_) {
      current_ = next();
      if (current_ == nullptr) return progress;
      head_pending_ = true;
      if (announced_.size() >= kSegmentsPerLink) {
        // A server takes only so many on one connection: begin a new one.
        fail({Code::unavailable, "too many segments were announced on one connection"});
        return Progress::broken;
      }
      for (const auto& block : current_->blocks) {
        const auto& segment = block->segment();
        if (lane_ == Lane::shm && segment != nullptr && announced_.try_emplace(segment->id(), segment).second)
          to_announce_.emplace_back(segment->id(), segment->fd());
      }
      if (!to_announce_.empty()) forget_gone_segments();
    }
    if (!to_announce_.empty()) {
      const auto [id, descriptor] = to_announce_.back();
      to_announce_.pop_back();
      Header header = current_->header;
      header.kind = static_cast<uint16_t>(descriptor < 0 ? Kind::segment_gone : Kind::segment);
      header.request = id;
      header.flags = 0;
      head_ = encode_head(header, {}, 0);
      attach_ = descriptor;
      pieces_.assign(1, head_);
      continue;
    }
    head_ = encode_head(current_->header, current_->parts, current_->body_bytes);
    pieces_.assign(1, head_);
    for (const std::span<const std::byte> piece : current_->body)
      if (!piece.empty()) pieces_.push_back(piece);
    head_pending_ = false;
  }
}

Link::Progress Link::receive(const std::function<bool(const FrameView&)>& handle) {
  Progress progress = Progress::idle;
  for (;;) {
    for (;;) {
      Result<std::optional<FrameView>> next = reader_.next();
      if (!next.ok()) {
        fail(next.status());
        return Progress::broken;
      }
      if (!*next) break;
      if (!handle(**next)) {
        fail({Code::unavailable, "the server ended the connection"});
        return Progress::broken;
      }
      progress = Progress::moved;
    }
    const std::span<std::byte> want = reader_.want();
    const ssize_t got = read(want);
    if (got > 0) {
      bytes_received += static_cast<uint64_t>(got);
      reader_.commit(static_cast<size_t>(got));
      continue;
    }
    if (got < 0 && errno == EAGAIN) return progress;
    fail({Code::unavailable, got == 0 ? "the connection was closed by the other end"
                                      : std::string("lost while receiving: ") + strerror(errno)});
    return Progress::broken;
  }
}

}  // namespace shoal
