// A server process's data plane: listeners, I/O threads, connections. Python starts and stops it and is
// on no data path.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "serve/placement.h"
#include "serve/session.h"

namespace shoal {

struct ServerOptions {
  std::string host = "127.0.0.1";
  uint16_t port = 0;      // 0: any free one
  std::string unix_path;  // "": no unix listener
  std::vector<std::byte> token;
  uint32_t shards = 64;
  size_t threads = 0;  // 0: one per core, at most 4
  size_t frame_bytes_max = kBodyBytesMax;
  size_t connections_max = 4096;  // more are refused
  bool placed = true;             // false: clients wait until `place` was called
  bool weak = false;              // updates are acknowledged before the servers behind have them
};

class Server {
 public:
  // Listening and serving when it returns.
  static Result<std::unique_ptr<Server>> start(ServerOptions options);
  virtual ~Server() = default;  // stops

  virtual uint16_t port() const = 0;
  virtual const ServerCounters& counters() const = 0;
  // Where the shards are; `index` is this server. One that is older than what is known changes nothing.
  virtual void place(uint32_t index, const Placement& placement) = 0;
  // Fills the server `target` with a shard of which this one is the last of the chain, while pushes go on.
  // When it returns, `target` has all that was acknowledged and is waited for by what will be.
  virtual Status fill(uint32_t shard, uint32_t target, uint32_t term,
                      std::chrono::steady_clock::time_point deadline) = 0;
  virtual ServerState& state() = 0;  // for images; it lives as long as the server
  virtual void stop() = 0;           // ends every connection and thread; idempotent
};

}  // namespace shoal
