// The client's side of the protocol, without I/O: which requests are open, what must be sent (again),
// which pushes are acknowledged everywhere. The socket driver and the simulator run this same code.
//
// Invariants:
//   - A push keeps its seq and its split by shard for ever; a retry sends the same parts.
//   - `low` is the smallest open seq: everything below is acknowledged on every shard.
//   - At most 256 pushes are open; `begin` says when the caller must wait.
//   - A request is answered once: late, duplicate or unknown replies change nothing.
// Not thread-safe.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "base/status.h"
#include "net/shm.h"
#include "serve/split.h"
#include "wire/frame.h"

namespace shoal {

class Operation;

// One frame to one server. It and the memory it names are kept until it is answered.
struct Request {
  std::shared_ptr<Operation> operation;
  uint32_t server = 0;
  Header header;
  std::vector<Part> parts;
  std::vector<std::span<const std::byte>> body;  // sent one after the other
  size_t body_bytes = 0;
  std::vector<std::span<const std::byte>> shared = {};  // pushes: what its parts name in shared memory
  std::vector<std::shared_ptr<Block>> blocks;           // memory that parts or body lie in
  std::span<const int64_t> keys = {};                   // pulls: what is asked for, in order
  // Pulls: key n goes to row positions[i] of the caller's result for i = heads[n], before[i], and so on.
  const uint32_t* positions = nullptr;
  const uint32_t* heads = nullptr;
  const uint32_t* before = nullptr;
  std::vector<std::shared_ptr<Request>> joined = {};  // pulls of several tables: what this is made of
  std::shared_ptr<const SplitKeys> split = {};  // pulls into shared memory: all keys, which lie in blocks[0]
  bool given_up = false;  // pulls: the server was, before it answered, and may write the rows when it wakes
};

// What the caller asked for; made of one or more requests.
class Operation {
 public:
  virtual ~Operation() = default;
  // A reply frame of one of its requests, before the request counts as answered. Any thread, no locks.
  // An error ends the operation with it: what cannot be made out is no answer.
  virtual Status on_reply(const Request& /*request*/, const FrameView& /*frame*/) { return {}; }

  bool done() const { return done_.load(std::memory_order_acquire); }
  const Status& status() const { return status_; }  // once done
  // For an operation that no machine carries (the embedded store): done here and now.
  void finish(Status status) {
    status_ = std::move(status);
    done_.store(true, std::memory_order_release);
  }

 private:
  friend class ClientMachine;
  std::atomic<bool> done_{false};
  Status status_;
  uint64_t seq_ = 0;  // pushes only
  size_t open_ = 0;   // requests without answer, and one while the caller still adds some
};

class ClientMachine {
 public:
  ClientMachine(uint64_t client, uint32_t incarnation, size_t servers);

  // There are so many servers now.
  void grow(size_t servers) { servers_.resize(std::max(servers_.size(), servers)); }
  // Opens an operation; a push gets the next seq. False: 256 pushes are open, wait for one to finish.
  bool begin(Operation& operation, bool is_push);
  // Adds a request. Its header's identity and request number are filled in here.
  void add(std::shared_ptr<Request> request);
  // The caller adds no more: the operation is done when all of its requests are answered.
  void seal(Operation& operation, Status status = {});

  // Next request to send to `server`, with `low` brought up to date; null when there is none.
  std::shared_ptr<Request> next_to_send(uint32_t server);
  bool has_open(uint32_t server) const { return !servers_[server].open.empty(); }
  size_t bytes_open(uint32_t server) const { return servers_[server].bytes_open; }
  size_t operations_open() const { return operations_open_; }
  // Whether a push or a commit is not acknowledged everywhere.
  bool writing() const;

  // The request that a reply answers, or null (unknown or answered already).
  std::shared_ptr<Request> find(uint32_t server, uint64_t request) const;
  // The reply was its last one: the request is over. An error ends the whole operation with it.
  void answered(uint32_t server, uint64_t request, Status status);

  // The connection is gone: what was sent and not answered will be sent again, in order.
  void lost(uint32_t server);
  // Every request to this server fails with `status` (refused, fenced, closed).
  void fail(uint32_t server, const Status& status);
  // Takes an open request out, to be added again as one or more and then sealed; null where it was answered.
  std::shared_ptr<Request> withdraw(uint32_t server, uint64_t request);
  std::vector<std::shared_ptr<Request>> open_requests(uint32_t server) const;
  // The smallest open seq, or the next one where none is open.
  uint64_t low() const { return open_seqs_.empty() ? next_seq_ : *open_seqs_.begin(); }
  uint64_t retries() const { return retries_; }
  // Servers that still owe this operation an answer.
  std::vector<uint32_t> waited_for(const Operation& operation) const;

 private:
  struct PerServer {
    std::map<uint64_t, std::shared_ptr<Request>> open;  // by request number
    std::deque<uint64_t> unsent;
    std::set<uint64_t> sent;
    size_t bytes_open = 0;
  };
  void close_one(Operation& operation);
  static size_t bytes_of(const Request& request);

  const uint64_t client_;
  const uint32_t incarnation_;
  uint64_t next_request_ = 1;
  uint64_t next_seq_ = 1;
  uint64_t retries_ = 0;
  size_t operations_open_ = 0;
  std::set<uint64_t> open_seqs_;
  std::vector<PerServer> servers_;
};

}  // namespace shoal
