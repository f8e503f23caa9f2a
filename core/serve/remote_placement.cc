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
    const auto before = builder_.placement();
    if (placement.version <= before->version || placement.servers.size() > kServersMax) return;
    while (servers_ < placement.servers.size()) {
      peers_[servers_] = std::make_unique<Peer>(placement.servers[servers_]);
      machine_.grow(servers_ + 1);
      ++servers_;
    }
    const auto now = std::make_shared<const Placement>(std::move(placement));
    for (uint32_t s = 0; s < shards(); ++s)
      if (now->head(s) != before->head(s))  // what was pulled so far is of the old one
        acknowledged_.seen(static_cast<uint16_t>(s), before->shards[s].term, builder_.version(s));
    builder_.set_placement(now);
    for (uint32_t i = 0; i < before->servers.size(); ++i) {
      if (!before->is_up(i) || now->is_up(i)) continue;
      for (const auto& request : machine_.open_requests(i)) refused(*request, gone_status(i));
    }
    servers = homeless_.send(machine_, builder_);
    changed_.notify_all();
  }
  for (const uint32_t server : servers) flush(server);
  wake();
}

Loss RemoteClient::taken_over(uint16_t shard, const Shard::Began& began) {
  const std::lock_guard lock(mutex_);
  const Loss loss = acknowledged_.taken_over(shard, began);
  if (loss.version > began.version) builder_.note_version(shard, kNoVersion);  // versions begin anew
  return loss;
}

// Under mutex_.
void RemoteClient::refused(const Request& request, Status why) {
  if (homeless_.take(machine_, request, std::move(why))) homes_next_ = Clock::now() + kHomesTick;
}

Status RemoteClient::gone_status(uint32_t server) const {
  return {Code::moved, peers_[server]->address.name() + " is gone"};
}

void RemoteClient::send_homeless() {
  std::vector<uint32_t> servers;
  {
    const std::lock_guard lock(mutex_);
    if (homeless_.empty() || Clock::now() < homes_next_) return;
    servers = homeless_.send(machine_, builder_);
  }
  for (const uint32_t server : servers) flush(server);
}

bool RemoteClient::hold(Deadline deadline) {
  bool in_job = false;
  {
    const std::lock_guard lock(mutex_);
    held_ = true;
    in_job = in_job_;
  }
  const auto still = [this] { return !machine_.writing() && committing_ == 0 && !half_step_; };
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
  held_ = false;
  changed_.notify_all();
  wake();
}

}  // namespace shoal
