// A client's connection to one server: dialled, proved, and then a stream of frames both ways without
// blocking. One thread may send while another receives.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "net/stream.h"
#include "serve/client_machine.h"
#include "wire/frame.h"

namespace shoal {

enum class Lane : uint8_t { memory, shm, unix_socket, tcp };
const char* lane_name(Lane lane);

struct ServerAddress {
  uint32_t index = 0;
  std::string host;
  uint16_t port = 0;
  std::string unix_path;  // "": none

  std::string name() const;  // "server 1 (127.0.0.1:4242)"
};

struct CoordinatorAddress {
  std::string host;
  uint16_t port = 0;
};

struct ClientIdentity {
  uint64_t client = 0;
  uint32_t incarnation = 0;
  std::vector<std::byte> token;
  uint32_t shards = 0;
};

class Link {
 public:
  using Clock = std::chrono::steady_clock;

  // Connects by the best lane that works (or by the one asked for) and proves the token both ways.
  // Every error names the server.
  static Result<std::unique_ptr<Link>> dial(const ServerAddress& address, std::optional<Lane> lane,
                                            const ClientIdentity& identity, Clock::time_point deadline);

  Link(std::unique_ptr<Stream> stream, Lane lane)  // not proved yet: use dial
      : stream_(std::move(stream)), lane_(lane) {}

  Lane lane() const { return lane_; }
  int fd() const { return stream_->fd(); }

  enum class Progress { idle, moved, blocked, broken };
  // Sends until there is nothing more (`next` gives null) or the socket is full.
  Progress send(const std::function<std::shared_ptr<Request>()>& next);
  // Reads what is there and hands every frame to `handle`; false from it means the server is to be left.
  Progress receive(const std::function<bool(const FrameView&)>& handle);
  Status failure() const;  // of a broken link
  void fail(Status status);
  // Says that this client will send no more, so that the server can forget it. A courtesy: it may fail.
  void goodbye(const ClientIdentity& identity);

  std::atomic<uint64_t> bytes_sent = 0;
  std::atomic<uint64_t> bytes_received = 0;

 private:
  Status handshake(const ClientIdentity& identity, Clock::time_point deadline);
  Status send_all(std::span<const std::byte> bytes, Clock::time_point deadline);
  Result<FrameView> receive_one(Clock::time_point deadline);
  Progress send_current();
  void forget_gone_segments();
  ssize_t read(std::span<std::byte> buffer);

  const std::unique_ptr<Stream> stream_;
  const Lane lane_;

  mutable std::mutex failure_mutex_;  // sender and receiver may both find that it is broken
  Status failure_;                    // guarded by failure_mutex_
  FrameReader reader_{kBodyBytesMax};
  std::unordered_map<uint32_t, std::weak_ptr<const Segment>> announced_;  // by id
  // The frame being sent.
  std::vector<std::byte> head_;
  std::vector<std::span<const std::byte>> pieces_;
  size_t piece_ = 0;
  size_t offset_ = 0;
  int attach_ = -1;                   // descriptor to go with its first byte
  std::shared_ptr<Request> current_;  // whose bytes `pieces_` are, or will be once segments are announced
  bool head_pending_ = false;         // current_ itself is not in pieces_ yet
  std::vector<std::pair<uint32_t, int>> to_announce_;  // segment ids and descriptors; -1: gone
};

}  // namespace shoal
