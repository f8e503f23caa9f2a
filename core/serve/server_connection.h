// One accepted socket of a server: reads frames into its session, queues and sends the replies. Owned
// and touched by one I/O thread only.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <vector>

#include "net/stream.h"
#include "serve/session.h"
#include "wire/frame.h"

namespace shoal {

class ServerConnection : private ReplySink {
 public:
  using Clock = std::chrono::steady_clock;

  ServerConnection(ServerState& server, std::unique_ptr<Stream> stream, size_t frame_bytes_max,
                   std::shared_ptr<Mailbox> mail);
  ~ServerConnection() override;

  int fd() const { return stream_->fd(); }
  // Reads, answers and sends as far as it goes without blocking. False: the connection is over.
  bool on_ready();
  // epoll events that it now waits for.
  uint32_t wanted_events() const;
  // A peer that has not proved the token by then is dropped.
  bool handshake_overdue(Clock::time_point now) const;
  uint64_t session() const { return session_.number(); }
  // Queues a reply that came late; `on_ready` sends it.
  void deliver(const Mailbox::Mail& mail);
  bool proved() const { return session_.proved(); }

 private:
  // ReplySink
  bool room() const override;
  Draft begin(size_t parts, size_t body_bytes) override;
  void finish(Header header) override;

  enum class Progress { more, blocked, over };
  Progress read_some();
  bool answer_frames();  // false: close after sending
  Progress send_some();

  // A frame to send.
  struct Outgoing {
    ReplyBuffers::Held buffer;
    size_t size = 0;
    size_t sent = 0;

    std::byte* bytes() const { return buffer->bytes.get(); }
  };

  ServerState& server_;
  const std::unique_ptr<Stream> stream_;
  const size_t frame_bytes_max_;
  const Clock::time_point accepted_;
  Session session_;
  FrameReader reader_;
  std::vector<int> descriptors_;
  std::optional<FrameView> pending_;  // a frame whose answer waits for room
  std::deque<Outgoing> out_;
  size_t out_bytes_ = 0;
  size_t draft_parts_ = 0;
  bool drafting_ = false;
  bool frames_left_ = false;  // the reader may hold frames that wait for room, too
  bool closing_ = false;
};

}  // namespace shoal
