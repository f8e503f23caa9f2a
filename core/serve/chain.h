// What a server has applied and sends on to the next servers of its shards' chains, and the replies that wait
// until the chain has it. Frames out, replies in; no I/O: the driver and the simulator run this same code.
//
// Invariants:
//   - An entry of a shard's log is kept until the server behind has it, and those behind that one; it is sent
//     again after a lost connection, and to whoever the next placement puts there, under that one's term.
//   - A reply leaves when every shard that it speaks for is held, up to its entry, by all servers behind.
//   - A server that has not learnt its place yet may have servers behind it: until then it keeps what the one
//     before it sends, and owes the replies.
// Thread-safe; calls `done` and `wake` without its lock.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "serve/client_machine.h"
#include "store/shard.h"
#include "wire/frame.h"

namespace shoal {

// Servers speak to each other as clients with an id of this range, by their index.
inline constexpr uint64_t kServerClients = uint64_t{1} << 63;
// The log of the sync shard's questions goes with shard 0 and is named by a number of its own.
inline constexpr uint16_t kSyncLog = 0xffff;

class Chain {
 public:
  // Of the `lost` shards this server left the chain before those behind had the entry: it is asked of others
  // now.
  using Done = std::function<void(const std::vector<uint16_t>& lost)>;
  using Bytes = std::shared_ptr<const std::vector<std::byte>>;
  // What frames carry behind their parts: bytes, or a part of a block that servers on this host may share.
  struct Body {
    Body(Bytes of) : bytes(std::move(of)), size(bytes->size()) {}
    Body(std::shared_ptr<Block> of, size_t from, size_t length)
        : block(std::move(of)), begin(from), size(length) {}
    std::span<const std::byte> span() const {
      return block != nullptr ? block->bytes().subspan(begin, size) : std::span(*bytes);
    }

    Bytes bytes = nullptr;
    std::shared_ptr<Block> block = nullptr;
    size_t begin = 0;
    size_t size;
  };
  // An entry of a shard's log: parts of that shard, whose arrays lie in the body.
  struct Entry {
    std::vector<Part> parts;
    Body body;
  };

  // `weak`: replies do not wait for the servers behind.
  Chain(std::function<void()> wake, bool weak);
  // Of a weak chain: 1 + the entries that the next server may not have. 0: what is answered is held behind.
  uint32_t unheld(uint16_t shard);
  bool in_use() const { return in_use_.load(std::memory_order_relaxed); }
  // Who this server is among `servers`: frames are sent in its name.
  void introduce(uint32_t server, uint32_t incarnation, size_t servers);

  // A shard's new place. What its next server does not have is sent, under the new term; the last of a chain
  // waits for nobody.
  void place(uint16_t shard, const ChainPlace& place);
  // Whether a server is behind this one in the chain of any of these parts' shards, or may be: what is
  // applied before the question and finds none is in the image of whoever comes later.
  bool goes_on(std::span<const Part> parts);
  // Sends entries to the next servers of their shards; to each what is for it.
  void send(const Header& header, std::vector<Entry> entries);
  // Memory for a body. It is shared once there is a server behind this one on this host.
  std::shared_ptr<Block> allocate(size_t bytes);
  void share_memory() { shares_memory_ = true; }
  // A table is new: the servers behind are told before they are sent anything of it.
  void declare(std::span<const std::byte> table);
  // Calls `done` once all entries of these parts, applied at their terms, are held by the servers behind; at
  // once where they are.
  void when_held(std::span<const Part> parts, Done done);

  // A server that is being filled with a shard: its image goes there by `send_image`, page by page, and the
  // entries behind the image wait until `image_sent`. From then on replies wait for it, and as soon as it has
  // all that was acknowledged without it, it is as good as the last of the chain.
  struct Fill {
    uint16_t shard = 0;
    uint32_t target = 0;
    uint32_t term = 0;
    // Guarded by the chain's mutex:
    size_t open = 0;  // frames without an answer
    size_t bytes = 0;
    bool done = false;
    Status failed;  // the target refused a frame, or the placement changed
  };
  using FillPtr = std::shared_ptr<Fill>;
  // Null where the shard's place is not that of `term`, or another server is behind this one.
  FillPtr begin_fill(uint16_t shard, uint32_t target, uint32_t term);
  // The target has nothing to be waited for; the chain is what it was.
  void give_up(const FillPtr& fill);
  void send_image(const FillPtr& fill, const Header& header, std::vector<Part> parts, Bytes body);
  void image_sent(const FillPtr& fill, uint64_t entry);
  // Whether who has read the shard up to `entry` shows what is neither acknowledged nor there: from the end
  // of its image on the target may be asked instead at any moment.
  bool is_ahead(uint16_t shard, uint64_t entry);
  // How far it is. `Fill` itself changes under the chain's mutex.
  struct FillState {
    size_t open;
    size_t bytes;
    bool done;
    Status failed;
  };
  FillState state(const FillPtr& fill);
  // Waits for an answer that comes after the first `answers`, or a new placement. False: none came in time.
  uint64_t answers();
  bool wait_for_answer(uint64_t answers, std::chrono::steady_clock::time_point deadline);

  // The shard is another one now, such as a checkpoint's: nothing of its log is held.
  void restored(uint16_t shard);

  // For the driver.
  size_t servers();
  // `near`: by shared memory, where it lies there.
  std::shared_ptr<Request> next_to_send(uint32_t server, bool near = false);
  bool has_open(uint32_t server);
  void lost(uint32_t server);
  void gone(uint32_t server);  // what is open with it is dropped; what is kept goes where a placement says
  void on_reply(uint32_t server, const FrameView& frame);

 private:
  struct Sent : Operation {
    std::vector<std::pair<size_t, Body>> bodies = {};  // and of how many parts each is
    std::vector<std::pair<uint16_t, uint64_t>> marks;  // shards and their entries
    FillPtr fill;                                      // may be null
    bool ends_fill = false;
  };
  struct Kept {
    Header header;
    Entry entry;
  };
  struct Waiter {
    size_t marks;
    std::vector<uint16_t> lost;
    Done done;
  };
  struct PerShard {
    ChainPlace place = {};
    bool placed = false;  // it has learnt its place
    bool paused = false;  // its image is not sent yet
    bool awaited = false;
    uint64_t held = 0;
    uint64_t alone = 0;  // the last entry that was acknowledged without the server that is filled
    std::map<uint64_t, Kept> unheld = {};
    size_t unheld_bytes = 0;
    std::multimap<uint64_t, std::shared_ptr<Waiter>> waiting = {};
  };
  static size_t bytes_of(const Entry& entry);
  std::shared_ptr<Sent> post(uint32_t target, const Header& header, std::span<const Entry> entries,
                             const FillPtr& fill = nullptr);
  bool is_current(const Fill& fill);
  void note_fills();
  void send_unheld(uint16_t shard);
  void hold(uint16_t shard, uint64_t entry, std::vector<std::shared_ptr<Waiter>>& ready);
  static void forget(PerShard& here, uint64_t up_to);
  static void release_all(PerShard& here, std::vector<std::shared_ptr<Waiter>>& ready);
  static bool waits(const PerShard& here);
  void end_fill(uint16_t shard, std::vector<std::shared_ptr<Waiter>>& ready);
  bool awaits(const ChainPlace& place) const;
  static bool goes_on(const PerShard& here);

  const std::function<void()> wake_;
  const bool weak_;
  const std::shared_ptr<Arena> shared_arena_;
  const std::shared_ptr<Arena> heap_arena_;
  std::atomic<bool> shares_memory_{false};
  std::mutex mutex_;
  std::condition_variable answered_;
  // Guarded by mutex_:
  uint64_t answers_ = 0;
  std::unique_ptr<ClientMachine> machine_;
  size_t servers_ = 0;
  std::atomic<bool> in_use_{false};  // there are servers behind this one
  std::unordered_map<uint16_t, PerShard> shards_;
  std::atomic<bool> images_sent_{false};  // of one of the fills at least
  std::map<uint16_t, FillPtr> fills_;  // by the shard, which goes on to their targets until it is placed anew
  // What was on its way to a server that was given up. If it only slept it reads that when it wakes, so the
  // memory may hold nothing else. Never more than what is shared at all, 512 MiB: what has no room there goes
  // through the socket.
  std::vector<std::shared_ptr<Block>> strays_;
};

}  // namespace shoal
