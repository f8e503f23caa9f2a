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
    placement.any_copy = before->any_copy;
    const auto now = std::make_shared<const Placement>(std::move(placement));
    builder_.set_placement(now);
    for (uint32_t i = 0; i < before->servers.size(); ++i) {
      if (!before->is_up(i) || now->is_up(i)) continue;
      for (const auto& request : machine_.open_requests(i)) {
        const bool writes_here = request->header.kind == static_cast<uint16_t>(Kind::pull) &&
                                 !request->parts.empty() && request->parts[0].values_segment != 0;
        if (writes_here)
          strays_.push_back(machine_.withdraw(i, request->header.request));
        else
          refused(*request, gone_status(i));
      }
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

// A server that was given up may only sleep, and write the rows of a pull that it was sent when it wakes. So
// the whole pull is made anew, through sockets and into memory that no server knows; the old memory is nobody
// else's while that server has its connection. Under mutex_, by the pump: it alone writes to `out`.
void RemoteClient::pull_anew(const Request& stray) {
  const auto merger = mergers_.take();
  const auto pull = [&](const Request& one) {
    const auto operation = std::static_pointer_cast<PullOperation>(one.operation);
    if (operation->block->segment() == nullptr) return true;  // another of its requests strayed, too
    auto fresh = builder_.allocate(4 * operation->rows * operation->row_floats, false);
    if (fresh == nullptr) return false;
    if (peers_[stray.server]->link != nullptr) peers_[stray.server]->strayed.push_back(operation->block);
    operation->block = std::move(fresh);
    operation->out = reinterpret_cast<float*>(operation->block->bytes().data());
    const RequestBuilder::Grouped grouped{one.blocks[0], one.split};
    const auto bytes = shard_bytes(*one.split, 4 * operation->row_floats + 8);
    for (const auto& frame : builder_.plan(bytes, kPullFrameBytes, true)) {
      auto request = builder_.pull(operation, grouped, frame, false, *merger);
      if (request == nullptr) return false;
      if (!stray.joined.empty()) request = RequestBuilder::join({std::move(request)});
      request->operation = stray.operation;
      for (auto& part : builder_.route(std::move(request))) machine_.add(std::move(part));
    }
    return true;
  };
  bool whole = true;
  if (stray.joined.empty()) whole = pull(stray);
  for (const auto& one : stray.joined) whole = whole && pull(*one);
  machine_.seal(*stray.operation, whole ? Status{} : Status{Code::internal, "out of memory for a pull"});
  changed_.notify_all();
}

void RemoteClient::send_homeless() {
  std::vector<uint32_t> servers;
  {
    const std::lock_guard lock(mutex_);
    if (!strays_.empty()) {
      std::vector<std::shared_ptr<Request>> early;  // the caller is still sending the rest of it
      for (auto& stray : std::exchange(strays_, {})) {
        if (static_cast<const ClientOperation&>(*stray->operation).sealed)
          pull_anew(*stray);
        else
          early.push_back(std::move(stray));
      }
      strays_ = std::move(early);
      servers = builder_.placement()->up();
    } else if (homeless_.empty() || Clock::now() < homes_next_) {
      return;
    }
    for (const uint32_t server : homeless_.send(machine_, builder_)) servers.push_back(server);
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
