#include "serve/chain.h"

namespace shoal {

Chain::Chain(uint32_t server, uint32_t incarnation, size_t servers, std::function<void()> wake)
    : wake_(std::move(wake)), machine_(kServerClients + server, incarnation, servers) {}

void Chain::send(uint32_t next, Header header, std::vector<Part> parts, std::vector<std::byte> bytes,
                 std::vector<Mark> marks) {
  auto sent = std::make_shared<Sent>();
  sent->bytes = std::move(bytes);
  sent->marks = std::move(marks);
  auto request = std::make_shared<Request>();
  request->operation = sent;
  request->server = next;
  request->header = header;
  request->parts = std::move(parts);
  request->body.emplace_back(sent->bytes);
  request->body_bytes = sent->bytes.size();
  {
    const std::lock_guard lock(mutex_);
    machine_.begin(*sent, false);
    machine_.add(std::move(request));
    machine_.seal(*sent);
  }
  wake_();
}

void Chain::when_held(std::span<const Mark> marks, Done done) {
  auto waiter = std::make_shared<Waiter>(Waiter{.marks = 0, .done = std::move(done)});
  {
    const std::lock_guard lock(mutex_);
    for (const Mark& mark : marks) {
      PerShard& shard = shards_[mark.shard];
      if (shard.held >= mark.entry) continue;
      shard.waiting.emplace(mark.entry, waiter);
      ++waiter->marks;
    }
    if (waiter->marks > 0) return;
  }
  waiter->done();
}

// Under mutex_.
void Chain::hold(Mark mark, std::vector<Done>& ready) {
  PerShard& shard = shards_[mark.shard];
  if (mark.entry <= shard.held) return;
  shard.held = mark.entry;
  const auto end = shard.waiting.upper_bound(mark.entry);
  for (auto it = shard.waiting.begin(); it != end; it = shard.waiting.erase(it))
    if (--it->second->marks == 0) ready.push_back(std::move(it->second->done));
}

void Chain::alone(uint32_t shard, uint64_t entry) {
  std::vector<Done> ready;
  {
    const std::lock_guard lock(mutex_);
    hold({shard, entry}, ready);
  }
  for (const Done& done : ready) done();
}

std::shared_ptr<Request> Chain::next_to_send(uint32_t server) {
  const std::lock_guard lock(mutex_);
  return machine_.next_to_send(server);
}

bool Chain::has_open(uint32_t server) {
  const std::lock_guard lock(mutex_);
  return machine_.has_open(server);
}

void Chain::lost(uint32_t server) {
  const std::lock_guard lock(mutex_);
  machine_.lost(server);
}

bool Chain::on_reply(uint32_t server, const FrameView& frame) {
  std::vector<Done> ready;
  {
    const std::lock_guard lock(mutex_);
    const std::shared_ptr<Request> request = machine_.find(server, frame.header.request);
    if (request == nullptr) return true;
    if (static_cast<Code>(frame.header.code) != Code::ok) return false;
    for (const Mark& mark : static_cast<const Sent&>(*request->operation).marks) hold(mark, ready);
    machine_.answered(server, frame.header.request, {});
  }
  for (const Done& done : ready) done();
  return true;
}

}  // namespace shoal
