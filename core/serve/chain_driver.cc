#include "serve/chain_driver.h"

#include <algorithm>

#include "base/log.h"

namespace shoal {
namespace {

constexpr auto kBackoffMin = std::chrono::milliseconds(10);
constexpr auto kBackoffMax = std::chrono::milliseconds(500);
constexpr auto kDialTime = std::chrono::milliseconds(500);  // others wait meanwhile

}  // namespace

ChainDriver::ChainDriver(Chain& chain, std::vector<std::byte> token, uint32_t shards) : chain_(chain) {
  identity_.token = std::move(token);
  identity_.shards = shards;
}

void ChainDriver::stop() {
  stopping_ = true;
  wake();
  if (thread_.joinable()) thread_.join();
}

void ChainDriver::introduce(uint32_t server, const std::vector<ServerAddress>& servers) {
  chain_.introduce(server, 1, servers.size());
  {
    const std::lock_guard lock(mutex_);
    identity_.client = kServerClients + server;
    identity_.incarnation = 1;
    while (peers_.size() < servers.size()) peers_.push_back(std::make_shared<Peer>(servers[peers_.size()]));
    for (size_t i = 0; i < servers.size(); ++i)
      if (servers[i].port == 0) peers_[i]->gone = true;
    if (!thread_.joinable() && !stopping_) thread_ = std::thread([this] { run(); });
  }
  wake();  // nothing else may: what waits for one that is gone has its place as it was
}

void ChainDriver::drop(uint32_t server, Peer& peer) {
  peer.link.reset();
  peer.blocked = false;
  chain_.lost(server);
  peer.next_attempt = Clock::now() + peer.backoff;
  peer.backoff = std::clamp(2 * peer.backoff, kBackoffMin, kBackoffMax);
}

void ChainDriver::carry(uint32_t server, Peer& peer) {
  if (peer.gone) {
    peer.link.reset();
    chain_.gone(server);
    return;
  }
  if (peer.link == nullptr) {
    if (!chain_.has_open(server) || Clock::now() < peer.next_attempt) return;
    const Lane lane = peer.address.unix_path.empty() ? Lane::tcp : Lane::shm;
    auto link = Link::dial(peer.address, lane, identity_, Clock::now() + kDialTime);
    if (!link.ok() && lane != Lane::tcp)  // on another host
      link = Link::dial(peer.address, Lane::tcp, identity_, Clock::now() + kDialTime);
    if (!link.ok()) {
      drop(server, peer);
      return;
    }
    peer.link = std::move(*link);
    if (peer.link->lane() == Lane::shm) chain_.share_memory();
  }
  const auto received = peer.link->receive([&](const FrameView& frame) {
    if (frame.header.kind == static_cast<uint16_t>(Kind::refuse)) return false;
    peer.backoff = {};
    chain_.on_reply(server, frame);
    return true;
  });
  const bool near = peer.link->lane() == Lane::shm;
  const auto sent = peer.link->send([&] { return chain_.next_to_send(server, near); });
  peer.blocked = sent == Link::Progress::blocked;
  if (received == Link::Progress::broken || sent == Link::Progress::broken) {
    log_line("server", "the connection to " + peer.address.name() +
                           " of a chain is lost: " + peer.link->failure().message());
    drop(server, peer);
  }
}

void ChainDriver::wait(const std::vector<std::pair<uint32_t, std::shared_ptr<Peer>>>& peers) {
  std::vector<pollfd> fds;
  auto until = Clock::now() + std::chrono::seconds(3600);
  for (const auto& [server, peer] : peers) {
    if (peer->link != nullptr)
      fds.push_back({peer->link->fd(), static_cast<short>(POLLIN | (peer->blocked ? POLLOUT : 0)), 0});
    else if (chain_.has_open(server))
      until = std::min(until, peer->next_attempt);
  }
  wake_.wait(fds, until);
}

void ChainDriver::run() {
  while (!stopping_) {
    std::vector<std::pair<uint32_t, std::shared_ptr<Peer>>> peers;
    {
      const std::lock_guard lock(mutex_);
      for (uint32_t i = 0; i < peers_.size(); ++i) peers.emplace_back(i, peers_[i]);
    }
    for (const auto& [server, peer] : peers) carry(server, *peer);
    if (!stopping_) wait(peers);
  }
}

}  // namespace shoal
