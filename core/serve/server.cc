#include "serve/server.h"

#include <sched.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <list>
#include <mutex>
#include <new>
#include <thread>

#include "base/log.h"
#include "net/poller.h"
#include "net/socket.h"
#include "serve/chain_driver.h"
#include "serve/fill.h"
#include "serve/server_connection.h"

namespace shoal {
namespace {

using Clock = std::chrono::steady_clock;

// After the last message a thread polls this long before it sleeps: a blocking wake-up costs as much.
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr int kHandshakeTickMs = 500;
constexpr size_t kStrangersMax = 64;  // of one thread
constexpr int kSocketBufferBytes = 4 * 1024 * 1024;

// One epoll loop. Connections are given to it once and stay.
class IoThread {
 public:
  IoThread(Poller poller, ServerState& state) : poller_(std::move(poller)), state_(state) {}

  void start(const std::atomic<bool>& stopping) {
    thread_ = std::thread([this, &stopping] { run(stopping); });
  }
  void wake() { poller_.wake(); }
  void join() {
    if (thread_.joinable()) thread_.join();
  }
  Poller& poller() { return poller_; }
  const std::shared_ptr<Mailbox>& mailbox() const { return mail_; }

  // From any thread.
  void adopt(std::unique_ptr<ServerConnection> connection) {
    {
      const std::lock_guard lock(mutex_);
      inbox_.push_back(std::move(connection));
    }
    poller_.wake();
  }

  // Called with the tag of a listener that is ready; false: it cannot be served now, try again in a while.
  std::function<bool(void*)> on_listener;

 private:
  struct Entry {
    std::unique_ptr<ServerConnection> connection;
    uint32_t events = EPOLLIN;
    std::list<Entry>::iterator self;
  };

  void take_inbox() {
    std::vector<std::unique_ptr<ServerConnection>> fresh;
    {
      const std::lock_guard lock(mutex_);
      fresh.swap(inbox_);
    }
    for (auto& connection : fresh) {
      const int fd = connection->fd();
      const auto list = [&] {
        entries_.push_back({.connection = std::move(connection), .events = EPOLLIN, .self = {}});
        return true;
      };
      if (!with_memory(list)) continue;
      Entry& entry = entries_.back();
      entry.self = std::prev(entries_.end());
      if (!poller_.add(fd, EPOLLIN, &entry).ok()) entries_.pop_back();
    }
  }

  // A proof takes a moment: of many that have yet to give one the oldest make room, so that strangers never
  // hold more than a few of the connections there can be. Not while events are gone through, either.
  void drop_strangers() {
    size_t strangers = 0;
    for (auto it = entries_.end(); it != entries_.begin();) {
      --it;
      if (it->connection->proved() || ++strangers <= kStrangersMax) continue;
      ++state_.counters.refused;
      poller_.remove(it->connection->fd());
      it = entries_.erase(it);
    }
  }

  // The library throws one thing that we cannot ask for beforehand: out of memory. It costs the connection
  // whose request was too much, not the server.
  template <typename Work>
  static bool with_memory(Work work) {
    try {
      return work();
    } catch (const std::bad_alloc&) {
      log_line("server", "connection closed: out of memory for its request");
      return false;
    }
  }

  void serve(Entry& entry, const Mailbox::Mail* mail = nullptr) {
    const auto work = [&] {
      if (mail != nullptr) entry.connection->deliver(*mail);
      return entry.connection->on_ready();
    };
    if (!with_memory(work)) {
      poller_.remove(entry.connection->fd());
      entries_.erase(entry.self);
      return;
    }
    const uint32_t events = entry.connection->wanted_events();
    if (events != entry.events) {
      entry.events = events;
      poller_.change(entry.connection->fd(), events, &entry);
    }
  }

  // Answers that other threads made ready. Not while events are gone through: one of those that are left
  // may be of a connection that ends here.
  void take_mail() {
    for (const Mailbox::Mail& mail : mail_->take()) {
      const auto entry = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) {
        return e.connection->session() == mail.session;
      });
      if (entry == entries_.end()) continue;
      serve(*entry, &mail);
    }
  }

  // Drops peers that never proved the token; says whether some are still due.
  bool drop_overdue() {
    const auto now = Clock::now();
    bool waiting = false;
    for (auto it = entries_.begin(); it != entries_.end();) {
      if (it->connection->handshake_overdue(now)) {
        log_line("server", "connection refused: no proof of the token within 5 s");
        ++state_.counters.refused;
        poller_.remove(it->connection->fd());
        it = entries_.erase(it);
      } else {
        waiting = waiting || !it->connection->proved();
        ++it;
      }
    }
    return waiting;
  }

  void run(const std::atomic<bool>& stopping) {
    Clock::time_point spin_until{};
    Clock::time_point next_check{};
    bool handshakes = false;
    while (!stopping.load(std::memory_order_relaxed)) {
      const bool spinning = Clock::now() < spin_until;
      const auto events = poller_.wait(spinning ? 0 : handshakes ? kHandshakeTickMs : -1);
      if (events.empty() && spinning) {
        sched_yield();  // whoever is runnable goes first
        continue;
      }
      bool served = false;
      bool arrived = false;
      for (const epoll_event& event : events) {
        if (event.data.ptr == nullptr) {
          take_inbox();
          arrived = handshakes = true;
        } else if (is_listener(event.data.ptr)) {
          if (!with_memory([&] { return on_listener(event.data.ptr); })) {
            set_listeners(0);  // out of descriptors, say: polling it at once again would only burn a core
            handshakes = true;
          }
        } else {
          serve(*static_cast<Entry*>(event.data.ptr));
          served = true;
        }
      }
      take_mail();
      if (arrived) drop_strangers();
      if (served) spin_until = Clock::now() + kSpin;
      if (handshakes && Clock::now() >= next_check) {
        handshakes = drop_overdue();
        set_listeners(EPOLLIN);
        next_check = Clock::now() + std::chrono::milliseconds(kHandshakeTickMs);
      }
    }
    entries_.clear();
  }

 public:
  std::vector<std::pair<int, void*>> listeners;  // descriptors and tags; set before start

 private:
  bool is_listener(void* tag) const {
    return std::any_of(listeners.begin(), listeners.end(), [tag](const auto& l) { return l.second == tag; });
  }
  void set_listeners(uint32_t events) {
    for (const auto& [fd, tag] : listeners) poller_.change(fd, events, tag);
  }

  Poller poller_;
  ServerState& state_;
  const std::shared_ptr<Mailbox> mail_ = std::make_shared<Mailbox>([this] { poller_.wake(); });
  std::thread thread_;
  std::list<Entry> entries_;  // touched by thread_ only
  std::mutex mutex_;
  std::vector<std::unique_ptr<ServerConnection>> inbox_;  // guarded by mutex_
};

class EpollServer : public Server {
 public:
  EpollServer(ServerOptions options, size_t threads)
      : options_(std::move(options)),
        state_(options_.shards, options_.token, threads - 1, options_.weak, [this] { driver_.wake(); }),
        driver_(state_.chain, options_.token, options_.shards) {}

  ~EpollServer() override { stop(); }

  Status open(size_t threads) {
    for (uint32_t s = 0; s < options_.shards && !options_.placed; ++s) state_.store.shard(s).unplace();
    Result<Fd> tcp = listen_tcp(options_.host, options_.port);
    if (!tcp.ok()) return tcp.status();
    const Result<uint16_t> port = local_port(tcp->get());
    if (!port.ok()) return port.status();
    port_ = *port;
    listeners_.push_back({std::move(*tcp), false});
    if (!options_.unix_path.empty()) {
      Result<Fd> local = listen_unix(options_.unix_path);
      if (!local.ok()) return local.status();
      listeners_.push_back({std::move(*local), true});
    }
    for (size_t i = 0; i < threads; ++i) {
      Result<Poller> poller = Poller::make();
      if (!poller.ok()) return poller.status();
      io_.push_back(std::make_unique<IoThread>(std::move(*poller), state_));
    }
    for (Listener& listener : listeners_) {
      io_[0]->listeners.emplace_back(listener.fd.get(), &listener);
      if (Status status = io_[0]->poller().add(listener.fd.get(), EPOLLIN, &listener); !status.ok())
        return status;
    }
    io_[0]->on_listener = [this](void* tag) { return accept(*static_cast<Listener*>(tag)); };
    for (const auto& io : io_) io->start(stopping_);
    return {};
  }

  uint16_t port() const override { return port_; }

  const ServerCounters& counters() const override { return state_.counters; }
  ServerState& state() override { return state_; }

  void place(uint32_t index, const Placement& placement) override {
    const std::lock_guard lock(place_mutex_);
    if (placement.version <= state_.placement || placement.shards.size() != options_.shards) return;
    driver_.introduce(index, placement.servers);
    state_.place(placement.version, placement.places_of(index));
  }

  Status fill(uint32_t shard, uint32_t target, uint32_t term, Clock::time_point deadline) override {
    return fill_replica(state_, shard, target, term, deadline);
  }

  void stop() override {
    if (stopping_.exchange(true)) return;
    driver_.stop();
    for (const auto& io : io_) io->wake();
    for (const auto& io : io_) io->join();
    listeners_.clear();
    if (!options_.unix_path.empty() && options_.unix_path[0] != '@') unlink(options_.unix_path.c_str());
  }

 private:
  struct Listener {
    Fd fd;
    bool is_unix;
  };

  bool accept(Listener& listener) {
    for (;;) {
      Result<Fd> socket = accept_connection(listener.fd.get());
      if (!socket.ok()) {
        log_line("server", socket.status().message());
        return false;
      }
      if (!socket->valid()) return true;
      if (listener.is_unix && !peer_is_same_user(socket->get())) {
        log_line("server", "connection refused: the unix socket is for the server's own user");
        ++state_.counters.refused;
        continue;
      }
      if (state_.counters.connections_open >= options_.connections_max) {
        turn_away(socket->get());
        continue;
      }
      if (listener.is_unix) set_buffers(socket->get(), kSocketBufferBytes);  // tcp tunes its own, and better
      auto stream =
          listener.is_unix ? make_unix_stream(std::move(*socket)) : make_tcp_stream(std::move(*socket));
      IoThread& io = *io_[next_io_++ % io_.size()];
      io.adopt(std::make_unique<ServerConnection>(state_, std::move(stream), options_.frame_bytes_max,
                                                  io.mailbox()));
    }
  }

  // Says why in a frame, as far as it goes without waiting.
  void turn_away(int fd) {
    const std::string why = std::to_string(options_.connections_max) + " are open";
    log_line("server", "connection refused: " + why);
    ++state_.counters.refused;
    const std::string text =
        "it takes " + std::to_string(options_.connections_max) + " connections, and " + why;
    Header header;
    header.kind = static_cast<uint16_t>(Kind::refuse);
    header.code = static_cast<uint16_t>(Code::unavailable);
    std::vector<std::byte> frame = encode_head(header, {}, round_up(text.size(), 64));
    const auto bytes = std::as_bytes(std::span(text));
    frame.insert(frame.end(), bytes.begin(), bytes.end());
    frame.resize(sizeof(Header) + round_up(text.size(), 64));
    [[maybe_unused]] const ssize_t sent = write(fd, frame.data(), frame.size());
  }

  const ServerOptions options_;
  ServerState state_;
  ChainDriver driver_;
  std::mutex place_mutex_;
  std::list<Listener> listeners_;
  std::vector<std::unique_ptr<IoThread>> io_;
  uint16_t port_ = 0;
  size_t next_io_ = 0;  // touched by io_[0] only
  std::atomic<bool> stopping_{false};
};

}  // namespace

Result<std::unique_ptr<Server>> Server::start(ServerOptions options) {
  if (options.shards < 1 || options.shards > kShardsMax) {
    return Status{Code::bad_input,
                  "shards " + std::to_string(options.shards) + " is not in 1.." + std::to_string(kShardsMax)};
  }
  const size_t threads = options.threads != 0 ? options.threads : std::clamp<size_t>(usable_cores(), 1, 4);
  auto server = std::make_unique<EpollServer>(std::move(options), threads);
  if (Status status = server->open(threads); !status.ok()) return status;
  return std::unique_ptr<Server>(std::move(server));
}

}  // namespace shoal
