#include "serve/server_connection.h"

#include <sys/epoll.h>
#include <sys/uio.h>

#include <array>
#include <cassert>
#include <cerrno>
#include <cstring>

namespace shoal {
namespace {

constexpr size_t kOutBytesMax = 1 * 1024 * 1024;      // answers queued before a pull waits for its reader
constexpr auto kTurn = std::chrono::milliseconds(1);  // then others go first
constexpr size_t kWarmBytesMax = 5 * 1024 * 1024;     // larger buffers are not kept
constexpr size_t kDescriptorsMax = 16;
constexpr auto kHandshakeTime = std::chrono::seconds(5);

}  // namespace

ServerConnection::ServerConnection(ServerState& server, std::unique_ptr<Stream> stream,
                                   size_t frame_bytes_max, std::shared_ptr<Mailbox> mail)
    : server_(server),
      stream_(std::move(stream)),
      frame_bytes_max_(frame_bytes_max),
      accepted_(Clock::now()),
      session_(server, std::move(mail)),
      reader_(kHandshakeBodyMax) {
  ++server_.counters.connections_open;
}

ServerConnection::~ServerConnection() {
  --server_.counters.connections_open;
  for (const int fd : descriptors_) {
    close(fd);
  }
}

bool ServerConnection::handshake_overdue(Clock::time_point now) const {
  return !session_.proved() && now - accepted_ > kHandshakeTime;
}

void ServerConnection::deliver(const Mailbox::Mail& mail) {
  const Draft draft = begin(mail.parts.size(), mail.body.size());
  std::copy(mail.parts.begin(), mail.parts.end(), draft.parts);
  std::copy(mail.body.begin(), mail.body.end(), draft.body);
  finish(mail.header);
}

uint32_t ServerConnection::wanted_events() const {
  // While an answer waits for room nothing more is read; the client always reads, so this ends.
  const bool reading = !pending_ && !frames_left_ && !closing_;
  return (reading ? uint32_t{EPOLLIN} : 0u) | (out_.empty() ? 0u : uint32_t{EPOLLOUT});
}

bool ServerConnection::room() const { return out_bytes_ < kOutBytesMax; }

ReplySink::Draft ServerConnection::begin(size_t parts, size_t body_bytes) {
  const size_t head = sizeof(Header) + parts * sizeof(Part);
  // Padded, so that the reader finds the next frame aligned.
  const size_t body = (body_bytes + 63) / 64 * 64;
  if (drafting_) out_.pop_back();  // was never finished
  drafting_ = false;
  Outgoing out{.buffer = server_.reply_buffers.take(), .size = head + body};
  if (out.buffer->capacity < out.size) {
    *out.buffer = {};  // given back before more is asked for
    out.buffer->bytes = std::make_unique_for_overwrite<std::byte[]>(out.size);
    out.buffer->capacity = out.size;
  }
  draft_parts_ = parts;
  std::byte* base = out.bytes();
  out_.push_back(std::move(out));
  drafting_ = true;
  auto* draft_parts = reinterpret_cast<Part*>(base + sizeof(Header));
  std::fill_n(draft_parts, parts, Part{});
  std::memset(base + head + body_bytes, 0, body - body_bytes);
  return {draft_parts, base + head};
}

void ServerConnection::finish(Header header) {
  const Outgoing& out = out_.back();
  const auto* parts = reinterpret_cast<const Part*>(out.bytes() + sizeof(Header));
  const size_t head = sizeof(Header) + draft_parts_ * sizeof(Part);
  seal_head(header, {parts, draft_parts_}, out.size - head, out.bytes());
  out_bytes_ += out.size;
  drafting_ = false;
}

bool ServerConnection::on_ready() {
  const auto until = Clock::now() + kTurn;
  bool has_read = false;
  for (;;) {
    closing_ = closing_ || !answer_frames();
    const Progress sent = send_some();
    if (sent == Progress::over || (closing_ && out_.empty())) {
      return false;
    }
    const bool unfinished = pending_ || frames_left_;
    if (closing_ || (unfinished && sent == Progress::blocked)) {
      return true;
    }
    if (unfinished) {
      continue;
    }
    // All that was read is answered: others may go first now. What is left wakes this connection again. A
    // turn that read nothing would be the same turn again: on a slow machine for ever.
    if (has_read && Clock::now() > until) {
      return true;
    }
    switch (read_some()) {
      case Progress::over: return false;
      case Progress::blocked: return true;
      case Progress::more: has_read = true;
    }
  }
}

ServerConnection::Progress ServerConnection::read_some() {
  const std::span<std::byte> want = reader_.want();
  if (want.empty()) {
    return Progress::over;
  }
  const ssize_t got = stream_->read(want, descriptors_);
  if (got == 0 || descriptors_.size() > kDescriptorsMax) {
    return Progress::over;
  }
  if (got < 0) {
    return errno == EAGAIN ? Progress::blocked : Progress::over;
  }
  reader_.commit(static_cast<size_t>(got));
  server_.counters.bytes_in += static_cast<uint64_t>(got);
  return Progress::more;
}

bool ServerConnection::answer_frames() {
  frames_left_ = false;
  for (;;) {
    if (!pending_) {
      Result<std::optional<FrameView>> next = reader_.next();
      if (!next.ok()) {
        session_.refuse(next.status(), *this);
        return false;
      }
      if (!*next) {
        return true;
      }
      pending_ = **next;
    }
    const bool was_proved = session_.proved();
    const Session::Outcome outcome = session_.on_frame(*pending_, *this, descriptors_);
    if (outcome == Session::Outcome::later) {
      return true;
    }
    pending_.reset();
    if (outcome == Session::Outcome::close) {
      return false;
    }
    if (!was_proved && session_.proved()) {
      reader_.set_body_bytes_max(frame_bytes_max_);
    }
    if (!room()) {
      frames_left_ = true;
      return true;
    }
  }
}

ServerConnection::Progress ServerConnection::send_some() {
  while (!out_.empty()) {
    std::array<iovec, 16> pieces;
    size_t count = 0;
    for (auto it = out_.begin(); it != out_.end() && count < pieces.size(); ++it, ++count) {
      pieces[count] = {it->bytes() + it->sent, it->size - it->sent};
    }
    const ssize_t sent = stream_->write(std::span(pieces.data(), count), -1);
    if (sent < 0) {
      return errno == EAGAIN ? Progress::blocked : Progress::over;
    }
    server_.counters.bytes_out += static_cast<uint64_t>(sent);
    auto left = static_cast<size_t>(sent);
    out_bytes_ -= left;
    while (left > 0) {
      Outgoing& front = out_.front();
      const size_t taken = std::min(left, front.size - front.sent);
      front.sent += taken;
      left -= taken;
      if (front.sent == front.size) {
        if (front.buffer->capacity > kWarmBytesMax) *front.buffer = {};
        out_.pop_front();
      }
    }
  }
  return Progress::more;
}

}  // namespace shoal
