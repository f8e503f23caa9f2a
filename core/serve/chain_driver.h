// The thread that carries a server's chain: dials the next servers, sends to them, hears their answers.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>

#include "net/wake_fd.h"
#include "serve/chain.h"
#include "serve/link.h"

namespace shoal {

class ChainDriver {
 public:
  ChainDriver(Chain& chain, std::vector<std::byte> token, uint32_t shards);
  ~ChainDriver() { stop(); }

  void wake() { wake_.wake(); }  // from any thread
  // Who this server is, and where the others are. The first call starts the thread.
  void introduce(uint32_t server, const std::vector<ServerAddress>& servers);
  void stop();

 private:
  using Clock = std::chrono::steady_clock;
  struct Peer {
    explicit Peer(ServerAddress where) : address(std::move(where)) {}

    const ServerAddress address;
    std::unique_ptr<Link> link = nullptr;
    Clock::time_point next_attempt = {};
    std::chrono::milliseconds backoff{0};
    bool blocked = false;
    std::atomic<bool> gone{false};
  };
  void run();
  void carry(uint32_t server, Peer& peer);
  void drop(uint32_t server, Peer& peer);
  void wait(const std::vector<std::pair<uint32_t, std::shared_ptr<Peer>>>& peers);

  Chain& chain_;
  ClientIdentity identity_;
  const WakeFd wake_;
  std::thread thread_;
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::vector<std::shared_ptr<Peer>> peers_;  // guarded by mutex_; a Peer is touched by the thread alone
};

}  // namespace shoal
