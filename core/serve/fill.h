// A new last server of a shard's chain: it gets an image of the shard and then what was pushed since.
#pragma once

#include <chrono>

#include "serve/session.h"

namespace shoal {

// One fill, without waiting: the server's thread and the simulator run this same code.
class Filler {
 public:
  // Fills `target` with `shard`, whose chain ends here at `term`.
  Filler(ServerState& server, uint32_t shard, uint32_t target, uint32_t term);
  ~Filler();
  Filler(const Filler&) = delete;
  Filler& operator=(const Filler&) = delete;

  // Sends what may be sent now. `unavailable`: call again when the chain was answered; ok: the target has it
  // all and is kept up to date. Another status is the end of it.
  Status step();
  void give_up();

 private:
  Status advance();
  void begin();
  void send(const Chain::FillPtr& to, Kind kind, std::vector<Part> parts, std::vector<std::byte> body);
  Status send_pages();

  enum class Phase { begin, sync, pages, drain, end };

  ServerState& server_;
  Chain& chain_;
  Shard& source_;
  Part part_;
  const uint32_t target_;
  Phase phase_ = Phase::begin;
  Chain::FillPtr fill_;
  Chain::FillPtr sync_fill_;  // of shard 0: the sync shard's
  uint64_t sync_entry_ = 0;
  Shard::ImageHead image_;
  bool reading_ = false;
};

// See Server::fill.
Status fill_replica(ServerState& server, uint32_t shard, uint32_t target, uint32_t term,
                    std::chrono::steady_clock::time_point deadline);

}  // namespace shoal
