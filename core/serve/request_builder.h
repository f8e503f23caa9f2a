// How pulls and pushes become requests: the split by shard and server, the merge of duplicates, the parts
// of each frame and the memory they lie in. No I/O and no state but the placement; the client and the
// simulator build their requests here.
//
// A push to one shard is one part group in one frame: the shard applies it as one update with one dedupe
// record. Large pushes are cut into several frames of whole shards, so that a server applies the first
// while the client still merges the next; their memory is handed back as soon as the server answers, so
// a few warm blocks serve any amount.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "net/shm.h"
#include "serve/client_machine.h"
#include "serve/placement.h"
#include "serve/split.h"
#include "serve/store_client.h"

namespace shoal {

// A pull whose rows may come through a socket, and are then put in their places as replies arrive.
class PullOperation : public ClientOperation {
 public:
  Codec codec = Codec::fp32;

  Status on_reply(const Request& request, const FrameView& frame) override;

 private:
  Status misfit() const;
  Status too_large(const std::string& where) const;
  Status place_rows(const Request& request, const Part& part, std::span<const std::byte> body);
  Status place_pieces(const Request& request, const Part& part, std::span<const std::byte> body);
};

// Pulls from several tables that travel together.
class ManyPulls : public ClientOperation {
 public:
  Status on_reply(const Request& request, const FrameView& frame) override;
};

inline constexpr size_t kPushFrameBytes = 256 * 1024;       // merged while the one before is applied
inline constexpr size_t kPullFrameBytes = 4 * 1024 * 1024;  // of rows that come back through a socket

class RequestBuilder {
 public:
  using PlacementPtr = std::shared_ptr<const Placement>;
  // `shared` may be null: then nothing is shared.
  RequestBuilder(PlacementPtr placement, std::shared_ptr<Arena> shared, std::shared_ptr<Arena> heap);

  PlacementPtr placement() const {
    const std::lock_guard lock(mutex_);
    return placement_;
  }
  void set_placement(PlacementPtr placement) {
    const std::lock_guard lock(mutex_);
    placement_.swap(placement);
  }
  uint32_t shards() const { return static_cast<uint32_t>(versions_.size()); }

  // Where it goes by the placement of now: itself, or one request for each server that its shards are at,
  // each with some of its parts. What belongs to one server, whatever the placement, is not split.
  std::vector<std::shared_ptr<Request>> route(std::shared_ptr<Request> request) const;

  // Warm memory, shared where asked for and to be had; null when there is none at all.
  std::shared_ptr<Block> allocate(size_t bytes, bool shared) const;

  // Keys grouped by shard, in a block of their own (behind the keys come the positions).
  struct Grouped {
    std::shared_ptr<Block> block;  // null: out of memory
    std::shared_ptr<const SplitKeys> split;
  };
  Grouped group(const TableSpec& spec, std::span<const int64_t> keys, bool shared) const;

  // Frames of whole shards of one server each, about `frame_bytes` each, the servers' in turn, and no more
  // than a frame can have where it is not of one shard. Pushes go to the heads of chains, pulls to where all
  // of them are seen.
  struct Frame {
    uint32_t server;
    std::vector<uint32_t> shards;
  };
  // `items` of a push have at most one part each in a shard.
  std::vector<Frame> plan(std::span<const size_t> shard_bytes, size_t frame_bytes, bool pulls,
                          size_t items = 1) const;
  // As many together as one frame has room for.
  static std::vector<std::vector<std::shared_ptr<Request>>> cut(
      std::vector<std::shared_ptr<Request>> requests, size_t body_bytes_max);
  // One frame of several: requests to one server, pushes or (all into shared memory, or none) pulls.
  static std::shared_ptr<Request> join(std::vector<std::shared_ptr<Request>> requests);

  // One such frame of a pull; null when out of memory. `shm`: its server can reach shared blocks, and
  // writes the rows in their places itself. Otherwise each distinct key travels once.
  std::shared_ptr<Request> pull(const std::shared_ptr<PullOperation>& operation, const Grouped& grouped,
                                const Frame& frame, bool shm, Merger& merger) const;
  // One such frame; null when out of memory. `check` (may be null) looks at the sums of duplicates.
  std::shared_ptr<Request> push(const SplitKeys& split, const Frame& frame, const PushItem& item,
                                const PushOptions& options, bool shm, Merger& merger,
                                FiniteCheck* check) const;
  // Whether a server can make out what it says only where it reaches our shared memory.
  static bool needs_shared_memory(const Request& request);
  // Such a push as another server gets it: all that it names in its body.
  static std::shared_ptr<Request> in_body(const Request& push);
  // All pieces of a dense tensor that lie in `shard`.
  std::shared_ptr<Request> push_pieces(const PushItem& item, uint32_t server, uint32_t shard,
                                       const PushOptions& options, bool shm) const;
  // What a pull saw, for pushes by staleness.
  void note_version(uint32_t shard, uint64_t version) const {
    if (shard < versions_.size()) versions_[shard] = version;
  }

 private:
  Part part_of(const TableSpec& spec, uint32_t shard, Codec codec) const;
  Part push_part(const PushItem& item, uint32_t shard, Codec codec, const PushOptions& options) const;
  std::shared_ptr<Request> push_request(uint32_t server, std::shared_ptr<Block> block,
                                        const PushOptions& options) const;
  void fill_pull_shared(const PullOperation& operation, const Grouped& grouped,
                        std::span<const uint32_t> frame_shards, Request& request) const;
  bool fill_pull_inline(const PullOperation& operation, const Grouped& grouped,
                        std::span<const uint32_t> frame_shards, Merger& merger, Request& request) const;

  mutable std::mutex mutex_;  // not std::atomic: that of g++ 12 lets go of its lock without an order
  PlacementPtr placement_;    // guarded by mutex_
  const std::shared_ptr<Arena> shared_;
  const std::shared_ptr<Arena> heap_;
  mutable std::vector<std::atomic<uint64_t>> versions_;  // by shard, at the last pull
};

}  // namespace shoal
