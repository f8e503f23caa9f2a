// What a server has applied and sends on to the next servers of its shards' chains, and the replies that wait
// until the chain has it. Frames out, replies in; no I/O: the driver and the simulator run this same code.
//
// Invariants:
//   - What is sent is kept until it is answered, and sent again after a lost connection.
//   - A reply leaves when every shard that it speaks for is held, up to its entry, by all servers behind.
//   - An answer of a server behind says that it has the entries, and that those behind it have them.
// Thread-safe; calls `done` and `wake` without its lock.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "serve/client_machine.h"
#include "wire/frame.h"

namespace shoal {

// Servers speak to each other as clients with an id of this range, by their index.
inline constexpr uint64_t kServerClients = uint64_t{1} << 63;

class Chain {
 public:
  struct Mark {
    uint32_t shard;
    uint64_t entry;
  };
  using Done = std::function<void()>;

  Chain(uint32_t server, uint32_t incarnation, size_t servers, std::function<void()> wake);

  // Sends a frame, whose body is `bytes`, on to the server `next`; it carries the marks' entries.
  void send(uint32_t next, Header header, std::vector<Part> parts, std::vector<std::byte> bytes,
            std::vector<Mark> marks);
  // Calls `done` once all marks are held by the servers behind; at once where they are.
  void when_held(std::span<const Mark> marks, Done done);
  // The last server of this shard's chain: nobody is waited for, up to the entry.
  void alone(uint32_t shard, uint64_t entry);

  // For the driver.
  std::shared_ptr<Request> next_to_send(uint32_t server);
  bool has_open(uint32_t server);
  void lost(uint32_t server);
  // An answer; false: the server refuses what it was sent, and the connection is of no use.
  bool on_reply(uint32_t server, const FrameView& frame);

 private:
  struct Sent : Operation {
    std::vector<std::byte> bytes;
    std::vector<Mark> marks;
  };
  struct Waiter {
    size_t marks;
    Done done;
  };
  struct PerShard {
    uint64_t held = 0;
    std::multimap<uint64_t, std::shared_ptr<Waiter>> waiting = {};
  };
  void hold(Mark mark, std::vector<Done>& ready);

  const std::function<void()> wake_;
  std::mutex mutex_;
  // Guarded by mutex_:
  ClientMachine machine_;
  std::unordered_map<uint32_t, PerShard> shards_;
};

}  // namespace shoal
