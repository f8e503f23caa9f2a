// The client of a store behind servers.
//
// Who does the I/O: the caller itself. Whoever waits becomes the pump (one at a time): it sends, receives
// and dispatches replies for everybody until its own operation is done, then hands over. A reply thus
// reaches its waiter without a thread switch. Operations that nobody waits for (async) are pumped by
// one background thread, which sleeps otherwise.
//
// Lock order: pump (the flag `pumping_`) > Peer::send_mutex > mutex_. No I/O under mutex_.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "base/pool.h"
#include "net/wake_fd.h"
#include "serve/client_protocol.h"
#include "serve/dialling.h"
#include "serve/link.h"
#include "serve/pulse.h"
#include "serve/request_builder.h"
#include "serve/store_client.h"

namespace shoal {

inline constexpr size_t kServersMax = 1024;

class RemoteClient : public StoreClient {
 public:
  RemoteClient(RemoteOptions options);
  ~RemoteClient() override { close(); }

  // Dials every server.
  Status connect(Deadline deadline);

  Status declare(const TableSpec& spec, Deadline deadline) override;
  Result<TableFigures> figures(uint32_t table, Deadline deadline) override;
  Result<StoreFigures> store_figures(Deadline deadline) override;
  Result<ScanPage> scan(uint32_t table, uint32_t shard, uint64_t cursor, size_t rows_max,
                        Deadline deadline) override;
  Status wait(const OperationPtr& operation, Deadline deadline) override;
  void leave(const OperationPtr& operation) override;
  ClientCounters counters() override;
  bool hold(Deadline deadline) override;
  void release() override;
  uint32_t shards() const override { return builder_.shards(); }
  void set_placement(Placement placement) override;
  Loss taken_over(uint16_t shard, const Shard::Began& began) override;
  void close() override;

 private:
  using Clock = std::chrono::steady_clock;

  struct Peer {
    explicit Peer(ServerAddress where) : address(std::move(where)) {}

    const ServerAddress address;
    std::mutex send_mutex;
    // Replaced by the pump only, under send_mutex; the pump itself reads it without.
    std::unique_ptr<Link> link;
    bool dialled = false;  // has ever been connected; touched by the pump only
    std::shared_ptr<Dialling<std::unique_ptr<Link>>> dialling;  // under way; touched by the pump only
    Clock::time_point down_since{};
    Clock::time_point next_attempt{};
    std::chrono::milliseconds backoff{0};
    Status down_because;  // guarded by mutex_
    Status refusal;       // the server's last word; touched by the pump only
    std::atomic<bool> broken{false};
    std::atomic<bool> blocked{false};  // the socket took no more: wait for it to be writable
    std::atomic<bool> shm{false};
    uint64_t sent_before = 0, received_before = 0;  // of links that are gone
    // Memory that this server may still write to: it was given up while it had the link. Guarded by mutex_.
    std::vector<std::shared_ptr<Block>> strayed;
  };

  // remote_client.cc: the pump
  class Pumping;
  Status until(const std::function<bool()>& done, Deadline deadline);  // `done` is asked under mutex_
  bool pump_once(Deadline deadline, bool may_block);
  void pump_if_free();
  void stop_pumping();
  void flush(uint32_t server);
  bool receive_from(uint32_t server);
  bool on_frame(uint32_t server, const FrameView& frame);
  void reconnect_if_due(uint32_t server, Deadline deadline);
  void connected(uint32_t server, std::unique_ptr<Link> link);
  void give_up_link(Peer& peer);
  void drop_link(uint32_t server, const Status& why);
  void block_until_ready(Deadline deadline);
  void keep();
  void wake() { wake_.wake(); }
  void submit(std::shared_ptr<Request> request);
  // remote_placement.cc: shards that move
  void send_homeless();
  void pull_anew(const Request& stray);
  uint32_t servers() const { return servers_; }
  Status late(const ClientOperation& operation);
  std::string describe_peer(uint32_t server) const;
  Status begin(ClientOperation& operation, bool is_push, Deadline deadline);
  Result<OperationPtr> seal(const OperationPtr& operation);

  // remote_requests.cc: what is sent
  Result<SpecPtr> lookup(uint32_t table) override;
  Status send_sync(const std::shared_ptr<SyncOperation>& operation, Deadline deadline) override;
  Status commit(const Commit& commit, Deadline deadline) override;
  Result<double> norm(const Commit& commit, Deadline deadline) override;
  std::shared_ptr<Block> allocate_rows(size_t bytes) override { return builder_.allocate(bytes, any_shm()); }
  Result<OperationPtr> send_pull(const OperationPtr& whole, std::span<const Pull> pulls,
                                 Deadline deadline) override;
  Result<OperationPtr> send_push(const OperationPtr& operation, std::span<const PushItem> items,
                                 const PushOptions& options, bool sums_are_safe, Deadline deadline) override;
  template <typename Figures>
  Result<Figures> sum_figures(uint32_t table, Deadline deadline);
  bool any_shm() const;
  Status send_budgeted(const OperationPtr& operation, std::shared_ptr<Request> request, Deadline deadline);
  Status give_up(const OperationPtr& operation, const char* why, Code code = Code::internal);
  Result<OperationPtr> sent_whole(const OperationPtr& operation,
                                  const std::function<Result<OperationPtr>()>& send);
  // One request to each of `servers`, with the same part (may be null) and body.
  Status send_question(const OperationPtr& operation, Kind kind, uint32_t version,
                       std::span<const uint32_t> servers, const Part* part, std::span<const std::byte> body,
                       Deadline deadline);
  using OnReply = std::function<Status(const Request&, const FrameView&)>;
  // The same to all servers, or (where the part names a shard) to that one's, and waited for. Asked again
  // from the beginning when the placement has changed meanwhile; `fresh` makes what takes the answers.
  Status ask(Kind kind, const Part* part, std::span<const std::byte> body,
             const std::function<OnReply()>& fresh, Deadline deadline);

  const RemoteOptions options_;
  const std::shared_ptr<Arena> shared_arena_;
  RequestBuilder builder_;
  const WakeFd wake_;
  std::vector<std::unique_ptr<Peer>> peers_;  // room for all there can be: those below servers_ are there
  std::atomic<uint32_t> servers_{0};
  Pool<Merger> mergers_{8};

  std::mutex mutex_;
  // Guarded by mutex_:
  ClientProtocol protocol_;
  ClientMachine& machine_ = protocol_.machine();
  std::unordered_map<uint32_t, std::shared_ptr<const TableSpec>> tables_;
  Clock::time_point homes_next_{};  // when what is homeless is tried again; zero: nobody has seen it yet
  bool pumping_ = false;
  bool background_ = false;  // somebody left an operation to the background thread
  bool closing_ = false;
  PushGate gate_;
  uint64_t clock_ = 0;
  size_t waiters_ = 0;
  uint64_t reconnects_ = 0;
  uint64_t requests_ = 0;
  std::atomic<uint64_t> pulls_{0}, pushes_{0};
  std::condition_variable changed_;  // an operation is done, or the pump is free
  std::condition_variable keeper_wanted_;

  std::thread keeper_;
  std::unique_ptr<Pulse> pulse_;
};

}  // namespace shoal
