// What a client does when shards move, servers come and go, or a cut is made.
#include <utility>

#include "serve/remote_client.h"

namespace shoal {
namespace {

constexpr auto kHomesTick = std::chrono::milliseconds(5);  // a server that has yet to learn a placement

}  // namespace

void RemoteClient::set_placement(Placement placement) {
  std::vector<uint32_t> servers;
  {
    const std::lock_guard lock(mutex_);
    if (placement.servers.size() > kServersMax) return;
    for (; servers_ < placement.servers.size(); ++servers_)
      peers_[servers_] = std::make_unique<Peer>(placement.servers[servers_]);
    if (!protocol_.set_placement(std::move(placement))) return;
    servers = protocol_.send_homeless();
    changed_.notify_all();
  }
  for (const uint32_t server : servers) flush(server);
  wake();
}

Loss RemoteClient::taken_over(uint16_t shard, const Shard::Began& began) {
  const std::lock_guard lock(mutex_);
  return protocol_.taken_over(shard, began);
}

// Into memory that no server knows, and through sockets: one of its servers does not reach ours, or was given
// up, and may only sleep and write the rows that it was asked for when it wakes. Then the old memory is
// nobody else's while that server has its connection. Under mutex_, by the pump: it alone writes to `out`.
// Where memory runs out the pull ends with that: it is half made, and nobody would go on with it.
void RemoteClient::pull_anew(const Request& stray) {
  Peer& peer = *peers_[stray.server];
  const bool may_write = stray.given_up && peer.link != nullptr;
  const auto pull = [&](const Request& one) {
    if (may_write) peer.strayed.push_back(one.blocks[1]);
    const auto merger = mergers_.take();
    const auto operation = std::static_pointer_cast<PullOperation>(one.operation);
    if (operation->block->segment() == nullptr) return true;  // another of its requests strayed, too
    auto fresh = builder_.allocate(4 * operation->rows * operation->row_floats, false);
    if (fresh == nullptr) return false;
    operation->block = std::move(fresh);
    operation->out = reinterpret_cast<float*>(operation->block->bytes().data());
    const RequestBuilder::Grouped grouped{one.blocks[0], one.split};
    const auto bytes = shard_bytes(*one.split, 4 * operation->row_floats + 8);
    for (const auto& frame : builder_.plan(bytes, kPullFrameBytes, true)) {
      auto request = builder_.pull(operation, grouped, frame, false, *merger);
      if (request == nullptr) return false;
      if (!stray.joined.empty()) request = RequestBuilder::join({std::move(request)});
      request->operation = stray.operation;
      protocol_.submit(std::move(request));
    }
    return true;
  };
  bool whole = true;
  try {
    if (stray.joined.empty()) whole = pull(stray);
    for (const auto& one : stray.joined) whole = whole && pull(*one);
  } catch (const std::bad_alloc&) {
    whole = false;
  }
  // So short that it needs no memory itself.
  machine_.seal(*stray.operation, whole ? Status{} : Status{Code::internal, "out of memory"});
  changed_.notify_all();
}

void RemoteClient::send_homeless() {
  std::vector<uint32_t> servers;
  {
    const std::lock_guard lock(mutex_);
    if (protocol_.strays()) {
      const auto sealed = [](const auto& stray) {  // else the caller is still sending the rest of it
        return static_cast<const ClientOperation&>(*stray->operation).sealed;
      };
      while (const auto stray = protocol_.take_stray(sealed)) pull_anew(*stray);
      servers = builder_.placement()->up();
    } else if (!protocol_.homeless()) {
      return;
    } else if (homes_next_ == Clock::time_point{}) {
      homes_next_ = Clock::now() + kHomesTick;
      return;
    } else if (Clock::now() < homes_next_) {
      return;
    }
    homes_next_ = {};
    for (const uint32_t server : protocol_.send_homeless()) servers.push_back(server);
  }
  for (const uint32_t server : servers) flush(server);
}

bool RemoteClient::hold(Deadline deadline) {
  bool in_job = false;
  {
    const std::lock_guard lock(mutex_);
    gate_.hold();
    in_job = gate_.in_job();
  }
  const auto still = [this] { return gate_.still(machine_); };
  Status status = until(still, deadline);
  if (status.ok() && in_job) {
    // The end of its last step was sent by the same connection: when this is answered, it was heard.
    const auto state = sync({}, deadline);
    status = state.ok() ? wait(*state, deadline) : state.status();
  }
  if (!status.ok()) release();
  return status.ok();
}

void RemoteClient::release() {
  const std::lock_guard lock(mutex_);
  gate_.release();
  changed_.notify_all();
  wake();
}

}  // namespace shoal
