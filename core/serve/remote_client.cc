#include "serve/remote_client.h"

#include <sched.h>

#include <algorithm>
#include <cassert>
#include <cstring>
#include <new>

namespace shoal {
namespace {

// After the last message a waiter polls this long before it sleeps: a blocking wake-up costs as much.
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr auto kBackoffMin = std::chrono::milliseconds(10);
constexpr auto kBackoffMax = std::chrono::milliseconds(500);
constexpr auto kDialTime = std::chrono::seconds(2);
constexpr auto kGrace = std::chrono::milliseconds(100);  // a thread that dials says more than its deadline
constexpr auto kTick = std::chrono::milliseconds(1);     // for what another thread ends without a word
constexpr size_t kSegmentBytesMin = size_t{64} << 20;
constexpr size_t kWarmBytes = size_t{1} << 30;

std::string seconds_text(std::chrono::steady_clock::duration time) {
  const double s = std::chrono::duration<double>(time).count();
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", s);
  return text;
}

std::shared_ptr<Dialling<std::unique_ptr<Link>>> begin_dialling(const ServerAddress& address,
                                                                std::optional<Lane> lane,
                                                                const ClientIdentity& identity,
                                                                Deadline deadline) {
  const auto dial = [=] { return Link::dial(address, lane, identity, deadline); };
  return Dialling<std::unique_ptr<Link>>::begin(dial, [] {});
}

bool waits_for_workers(const ClientOperation& operation) {
  const auto* question = dynamic_cast<const SyncOperation*>(&operation);
  if (question == nullptr) return false;
  const SyncVerb verb = question->request.verb;
  return verb == SyncVerb::open || verb == SyncVerb::advance || verb == SyncVerb::pass_end;
}

}  // namespace

// Whoever has one is the pump. However that ends, somebody else can be it: nobody else would ever close us.
class RemoteClient::Pumping {
 public:
  Pumping(RemoteClient& client, std::unique_lock<std::mutex>& lock) : client_(client), lock_(lock) {
    assert(lock_.owns_lock() && !client_.pumping_);
    client_.pumping_ = true;
  }
  ~Pumping() {
    if (!lock_.owns_lock()) lock_.lock();
    client_.stop_pumping();
  }

 private:
  RemoteClient& client_;
  std::unique_lock<std::mutex>& lock_;
};

RemoteClient::RemoteClient(RemoteOptions options)
    : options_(std::move(options)),
      shared_arena_(make_shared_arena(kSegmentBytesMin, options_.shm_bytes_max)),
      builder_(std::make_shared<const Placement>(options_.placement), shared_arena_,
               make_heap_arena(kWarmBytes)),
      peers_(kServersMax),
      protocol_(options_.identity.client, options_.identity.incarnation, builder_) {
  for (const ServerAddress& address : options_.placement.servers)
    peers_[servers_++] = std::make_unique<Peer>(address);
}

Status RemoteClient::connect(Deadline deadline) {
  const std::vector<uint32_t> servers = options_.placement.up();
  for (const uint32_t i : servers)
    peers_[i]->dialling = begin_dialling(peers_[i]->address, options_.lane, options_.identity, deadline);
  for (const uint32_t i : servers) {
    Peer& peer = *peers_[i];
    auto link = peer.dialling->result(deadline + kGrace);
    peer.dialling = nullptr;
    if (!link) return {Code::timeout, "no address of " + peer.address.name() + " was found in time"};
    if (!link->ok()) return link->status();
    connected(i, std::move(**link));
  }
  keeper_ = std::thread([this] { keep(); });
  if (options_.coordinators.empty()) return {};
  const auto progress = [this] {
    const std::lock_guard lock(mutex_);
    return PulseBeat{.clock = clock_, .pushes = pushes_, .pulls = pulls_};
  };
  auto pulse =
      Pulse::start(options_.coordinators, options_.identity,
                   {progress, [this](Deadline by) { return hold(by); }, [this] { release(); }}, deadline);
  if (!pulse.ok()) return pulse.status();
  pulse_ = std::move(*pulse);
  return {};
}

Status RemoteClient::until(const std::function<bool()>& done, Deadline deadline) {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (done()) return {};
    if (closing_) return {Code::closed, "this client was closed"};
    if (Clock::now() >= deadline) return {Code::timeout, ""};
    if (pumping_) {
      wake();  // the background thread gives way to whoever waits
      ++waiters_;
      changed_.wait_until(lock, deadline, [&] { return !pumping_ || closing_ || done(); });
      --waiters_;
      if (waiters_ == 0 && !pumping_ && background_)
        keeper_wanted_.notify_one();  // we may leave at once, and whoever pumped counted on us
      continue;
    }
    const Pumping pumping(*this, lock);
    auto spin_until = Clock::now() + kSpin;
    while (!done() && !closing_ && Clock::now() < deadline) {
      lock.unlock();
      const bool moved = pump_once(deadline, Clock::now() >= spin_until);
      if (moved)
        spin_until = Clock::now() + kSpin;
      else
        sched_yield();
      lock.lock();
    }
  }
}

void RemoteClient::pump_if_free() {
  std::unique_lock lock(mutex_);
  if (pumping_ || closing_) return;
  const Pumping pumping(*this, lock);
  lock.unlock();
  pump_once(Clock::now(), false);
}

// Hands over to whoever waits, or else to the background thread. Under mutex_.
void RemoteClient::stop_pumping() {
  pumping_ = false;
  if (waiters_ > 0)
    changed_.notify_all();
  else if (background_)
    keeper_wanted_.notify_one();
}

// The background thread: sees to operations that nobody waits for.
void RemoteClient::keep() {
  std::unique_lock lock(mutex_);
  while (!closing_) {
    keeper_wanted_.wait(lock, [&] {
      return closing_ || (background_ && !pumping_ && waiters_ == 0 && machine_.operations_open() > 0);
    });
    if (closing_) return;
    const Pumping pumping(*this, lock);
    lock.unlock();
    pump_once(Clock::now() + std::chrono::seconds(1), true);
    lock.lock();
    background_ = machine_.operations_open() > 0;
  }
}

// Out of memory costs nobody more than time: what is open is tried again as long as somebody waits for it.
bool RemoteClient::pump_once(Deadline deadline, bool may_block) try {
  bool moved = false;
  send_homeless();
  for (uint32_t i = 0; i < servers_; ++i) {
    Peer& peer = *peers_[i];
    if (peer.link == nullptr) reconnect_if_due(i, deadline);
    if (peer.link == nullptr) continue;
    // A link that broke while sending may still hold the server's last words.
    const bool broken = peer.broken;
    try {
      moved = receive_from(i) || moved;
    } catch (const std::bad_alloc&) {
      give_up_link(peer);
      moved = true;
    }
    if (broken && peer.link != nullptr) {
      drop_link(i, peer.link->failure());
      moved = true;
    }
    flush(i);
  }
  if (!moved && may_block) block_until_ready(deadline);
  return moved;
} catch (const std::bad_alloc&) {
  return false;
}

void RemoteClient::block_until_ready(Deadline deadline) {
  std::vector<pollfd> fds;
  auto until = std::min(deadline, Clock::now() + std::chrono::seconds(1));
  {
    const std::lock_guard lock(mutex_);
    if (protocol_.homeless()) until = std::min(until, homes_next_);
    if (protocol_.strays()) until = std::min(until, Clock::now() + kTick);
  }
  for (uint32_t i = 0; i < servers_; ++i) {
    const Peer& peer = *peers_[i];
    if (peer.link != nullptr && !peer.broken) {
      const short events = static_cast<short>(POLLIN | (peer.blocked ? POLLOUT : 0));
      fds.push_back({peer.link->fd(), events, 0});
      continue;
    }
    const std::lock_guard lock(mutex_);
    if (machine_.has_open(i))  // nobody dials a server that owes nothing
      until = std::min(until, peer.dialling != nullptr ? Clock::now() + kTick : peer.next_attempt);
  }
  wake_.wait(fds, until);
}

void RemoteClient::flush(uint32_t server) {
  Peer& peer = *peers_[server];
  const std::lock_guard sending(peer.send_mutex);
  if (peer.link == nullptr || peer.broken) return;
  Link::Progress progress = Link::Progress::broken;
  try {
    progress = peer.link->send([&] {
      const std::lock_guard lock(mutex_);
      return machine_.next_to_send(server);
    });
  } catch (const std::bad_alloc&) {
    give_up_link(peer);
  }
  const bool blocked = progress == Link::Progress::blocked;
  if (progress == Link::Progress::broken) {
    peer.broken = true;
    wake();
  } else if (blocked && !peer.blocked) {
    peer.blocked = true;
    wake();  // whoever pumps must also wait for room
  } else if (!blocked) {
    peer.blocked = false;
  }
}

void RemoteClient::submit(std::shared_ptr<Request> request) {
  std::vector<uint32_t> servers;
  {
    const std::lock_guard lock(mutex_);
    servers = protocol_.submit(std::move(request));
    requests_ += servers.size();
  }
  for (const uint32_t server : servers) flush(server);
}

bool RemoteClient::receive_from(uint32_t server) {
  Peer& peer = *peers_[server];
  const Link::Progress progress =
      peer.link->receive([&](const FrameView& frame) { return on_frame(server, frame); });
  if (progress == Link::Progress::broken) {
    const Status why = peer.link->failure();
    drop_link(server, why);
    return true;
  }
  return progress == Link::Progress::moved;
}

bool RemoteClient::on_frame(uint32_t server, const FrameView& frame) {
  Peer& peer = *peers_[server];
  if (frame.header.kind == static_cast<uint16_t>(Kind::refuse)) {
    const auto code = static_cast<Code>(frame.header.code);
    const std::string text(reinterpret_cast<const char*>(frame.body.data()), frame.body.size());
    peer.refusal = {code == Code::ok ? Code::refused : code,
                    peer.address.name() + ": " + text.substr(0, text.find('\0'))};
    return false;
  }
  peer.backoff = {};
  bool over = true;
  std::unique_lock lock(mutex_);
  if (const auto request = protocol_.heard(server, frame)) {
    lock.unlock();
    Status status = request->operation->on_reply(*request, frame);
    lock.lock();
    over = protocol_.taken(*request, frame, std::move(status));
  }
  if (over && waiters_ > 0) changed_.notify_all();
  return true;
}

// A frame was lost half way: the connection is made anew, and what is open sent again. Allocates nothing.
void RemoteClient::give_up_link(Peer& peer) {
  peer.link->fail({Code::internal, "out of memory"});
  peer.broken = true;
}

void RemoteClient::drop_link(uint32_t server, const Status& why) {
  Peer& peer = *peers_[server];
  const std::lock_guard sending(peer.send_mutex);
  const std::lock_guard lock(mutex_);
  if (peer.refusal.ok()) machine_.lost(server);  // first: where it throws, all this is done again
  if (peer.link != nullptr) {
    peer.sent_before += peer.link->bytes_sent;
    peer.received_before += peer.link->bytes_received;
    peer.link.reset();
    peer.down_since = Clock::now();
    // At once where this link had been of use, later and later where each new one is lost before it answers.
    peer.next_attempt = peer.down_since + peer.backoff;
    peer.backoff = std::clamp(2 * peer.backoff, kBackoffMin, kBackoffMax);
  }
  peer.broken = false;
  peer.blocked = false;
  peer.strayed.clear();
  peer.down_because = why;
  if (!peer.refusal.ok()) {
    // The server will not hear us: what is open with it has failed for good.
    peer.down_because = peer.refusal;
    machine_.fail(server, peer.refusal);
    peer.refusal = {};
    changed_.notify_all();
  }
}

void RemoteClient::reconnect_if_due(uint32_t server, Deadline deadline) {
  Peer& peer = *peers_[server];
  {
    const std::lock_guard lock(mutex_);
    if (!machine_.has_open(server) || closing_) return;
  }
  const auto now = Clock::now();
  if (peer.dialling == nullptr) {
    if (now < peer.next_attempt || now >= deadline) return;
    // By the same lane as before: open requests may lie in shared memory, which no other lane can reach.
    const auto lane = peer.dialled ? options_.lane.value_or(peer.shm ? Lane::shm : Lane::tcp) : options_.lane;
    peer.dialling = begin_dialling(peer.address, lane, options_.identity, now + kDialTime);
  }
  std::optional<Result<std::unique_ptr<Link>>> dialled = peer.dialling->result();
  if (!dialled) return;
  peer.dialling = nullptr;
  Result<std::unique_ptr<Link>>& link = *dialled;
  if (!link.ok()) {
    peer.backoff = std::clamp(2 * peer.backoff, kBackoffMin, kBackoffMax);
    peer.next_attempt = Clock::now() + peer.backoff;
    const Code code = link.status().code();
    const std::lock_guard lock(mutex_);
    peer.down_because = link.status();
    if (code == Code::refused || code == Code::fenced || code == Code::mismatch) {
      machine_.fail(server, link.status());  // trying again cannot help
      changed_.notify_all();
    }
    return;
  }
  const std::lock_guard sending(peer.send_mutex);
  const std::lock_guard lock(mutex_);
  ++reconnects_;
  peer.down_because = {};
  connected(server, std::move(*link));
}

// Under mutex_, or before there are other threads.
void RemoteClient::connected(uint32_t server, std::unique_ptr<Link> link) {
  Peer& peer = *peers_[server];
  peer.shm = link->lane() == Lane::shm;
  if (peer.shm) protocol_.set_shares_memory(server);
  peer.link = std::move(link);
  peer.dialled = true;
}

Status RemoteClient::begin(ClientOperation& operation, bool is_push, Deadline deadline) {
  bool begun = false;
  const Status status = until(
      [&] {
        if (is_push && !gate_.may_push()) return false;
        return begun || (begun = machine_.begin(operation, is_push));
      },
      deadline);
  if (status.code() == Code::timeout) {
    const std::lock_guard lock(mutex_);
    if (gate_.held()) return {Code::timeout, operation.what + ": pushes are held for a checkpoint"};
    std::string text =
        operation.what + ": 256 pushes are open and none was acknowledged in time; waiting for ";
    for (uint32_t i = 0; i < servers_; ++i) text += machine_.has_open(i) ? describe_peer(i) : "";
    return {Code::timeout, text};
  }
  return status;
}

Result<StoreClient::OperationPtr> RemoteClient::seal(const OperationPtr& operation) {
  const std::lock_guard lock(mutex_);
  machine_.seal(*operation);
  operation->sealed = true;
  if (waiters_ > 0)
    changed_.notify_all();  // it may be done already, and its seq free for whoever waits for one
  return operation;
}

Status RemoteClient::wait(const OperationPtr& operation, Deadline deadline) {
  const Status status = until([&] { return operation->done(); }, deadline);
  if (operation->done()) return operation->status();
  if (status.code() == Code::timeout) {
    leave(operation);  // it goes on: a push that may have been applied is never given up half way
    return late(*operation);
  }
  return status;
}

// Who it is and what is wrong with it. Under mutex_.
std::string RemoteClient::describe_peer(uint32_t server) const {
  const Peer& peer = *peers_[server];
  std::string text = peer.address.name();
  if (!peer.down_because.ok() && peer.down_since != Clock::time_point{}) {
    text += ", not connected since " + seconds_text(Clock::now() - peer.down_since) + " (" +
            peer.down_because.message() + ")";
  } else {
    text += ", connected but silent";
  }
  return text + "; ";
}

Status RemoteClient::late(const ClientOperation& operation) {
  const std::lock_guard lock(mutex_);
  std::string text = operation.what + " was not answered within " +
                     seconds_text(Clock::now() - operation.begun) + "; waiting for ";
  for (const uint32_t i : machine_.waited_for(operation)) text += describe_peer(i);
  return {Code::timeout, text + "it is still being tried in the background and can be waited for again"};
}

void RemoteClient::leave(const OperationPtr& operation) {
  const std::lock_guard lock(mutex_);
  if (!operation->done()) {
    background_ = true;
    keeper_wanted_.notify_one();
  }
}

ClientCounters RemoteClient::counters() {
  ClientCounters counters;
  for (uint32_t i = 0; i < servers_; ++i) {
    const auto& peer = peers_[i];
    const std::lock_guard sending(peer->send_mutex);
    counters.lanes.emplace_back(peer->link != nullptr ? lane_name(peer->link->lane()) : "down");
    counters.bytes_sent += peer->sent_before + (peer->link != nullptr ? peer->link->bytes_sent.load() : 0);
    counters.bytes_received +=
        peer->received_before + (peer->link != nullptr ? peer->link->bytes_received.load() : 0);
  }
  counters.shared_bytes = shared_arena_->bytes_mapped();
  const std::lock_guard lock(mutex_);
  counters.pulls = pulls_;
  counters.pushes = pushes_;
  counters.requests = requests_;
  counters.retries = machine_.retries();
  counters.reconnects = reconnects_;
  counters.reads_behind = protocol_.acknowledged().reads_behind();
  counters.versions_behind_max = protocol_.acknowledged().versions_behind_max();
  counters.waits_s.resize(servers_);
  for (const auto& request : protocol_.unanswered()) {
    const auto& operation = static_cast<const ClientOperation&>(*request->operation);
    if (waits_for_workers(operation)) continue;
    double& waits_s = counters.waits_s[request->server];
    waits_s = std::max(waits_s, std::chrono::duration<double>(Clock::now() - operation.begun).count());
  }
  return counters;
}

void RemoteClient::close() {
  {
    std::unique_lock lock(mutex_);
    if (closing_) return;
    closing_ = true;
    keeper_wanted_.notify_all();
    changed_.notify_all();
    wake();
    ++waiters_;
    changed_.wait(lock, [&] { return !pumping_; });
    --waiters_;
    pumping_ = true;  // for good: nobody else touches the links any more
  }
  pulse_.reset();
  if (keeper_.joinable()) keeper_.join();
  for (uint32_t i = 0; i < servers_; ++i) {
    const auto& peer = peers_[i];
    const std::lock_guard sending(peer->send_mutex);
    if (peer->link != nullptr && !peer->broken) peer->link->goodbye(options_.identity);
    peer->link.reset();
  }
  const std::lock_guard lock(mutex_);
  protocol_.send_homeless();
  while (const auto stray = protocol_.take_stray([](const auto&) { return true; }))
    machine_.seal(*stray->operation, closed_status());
  for (uint32_t i = 0; i < servers_; ++i) machine_.fail(i, closed_status());
  changed_.notify_all();
}

Result<std::unique_ptr<StoreClient>> connect_remote(RemoteOptions options, Deadline deadline) {
  auto client = std::make_unique<RemoteClient>(std::move(options));
  if (Status status = client->connect(deadline); !status.ok()) return status;
  return std::unique_ptr<StoreClient>(std::move(client));
}

}  // namespace shoal
