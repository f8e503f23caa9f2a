// Where a job's sync shard is asked: one request at a time, and each answered once, now or when another
// request makes it ready. Thread-safe; nothing is delivered under its lock.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "store/shard.h"
#include "store/sync_shard.h"
#include "wire/frame.h"

namespace shoal {

class SyncDesk {
 public:
  using Deliver = std::function<void(const SyncReply&)>;

  // What a question led to: its number in the log, and the answers that are ready.
  struct Handled {
    uint64_t entry = 0;
    double now = 0.0;
    std::vector<std::pair<Deliver, SyncReply>> ready = {};

    // Not `held`: another server answers in this one's place.
    void deliver(bool held) const {
      for (const auto& [call, reply] : ready)
        call(held ? reply : SyncReply{.status = {Code::moved, "the sync shard is elsewhere"}});
    }
  };

  // `deliver` will be called with the answer, by whoever delivers what this or a later question led to.
  Handled ask(const SyncRequest& request, Deliver deliver) {
    const std::lock_guard lock(mutex_);
    const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
    now_ = std::max(now_, now.count());
    waiting_.emplace(++tokens_, std::move(deliver));
    return handle(request);
  }

  // A question that another server answers, of that one's log. Whoever waits for it asks again if need be.
  Ack replay(const SyncRequest& request, double now, uint64_t entry) {
    const std::lock_guard lock(mutex_);
    Ack ack{.status = {}, .duplicate = entry <= entries_, .entry = entry};
    if (entry > entries_ + 1) ack.status = {Code::unavailable, "a question came before its turn"};
    if (!ack.status.ok() || ack.duplicate) return ack;
    now_ = std::max(now_, now);
    ++tokens_;
    handle(request);
    return ack;
  }

  // See Shard.
  Ack reached(uint64_t entry) {
    const std::lock_guard lock(mutex_);
    Ack ack{.status = {}, .duplicate = true, .entry = entry};
    if (entries_ < entry) ack.status = {Code::unavailable, "the log is not there yet"};
    return ack;
  }
  // Another server is asked from now on: whoever waits here is sent there.
  void turn_away() {
    std::unordered_map<uint64_t, Deliver> waiting;
    {
      const std::lock_guard lock(mutex_);
      waiting.swap(waiting_);
    }
    for (const auto& [token, call] : waiting)
      call(SyncReply{.status = {Code::moved, "the sync shard is elsewhere"}});
  }

  struct Image {
    std::vector<std::byte> bytes;
    std::vector<uint64_t> clocks;
    uint64_t entry = 0;  // the last of the log that it holds
  };
  Image image(bool live = false) {
    const std::lock_guard lock(mutex_);
    return {shard_.encode(live), shard_.clocks(), entries_};
  }
  // False: these bytes are no sync shard, or somebody waits at this desk.
  bool decode(std::span<const std::byte> in, uint64_t entry = 0) {
    const std::lock_guard lock(mutex_);
    if (!waiting_.empty() || !shard_.decode(in)) return false;
    entries_ = entry;
    return true;
  }

 private:
  Handled handle(const SyncRequest& request) {
    Handled handled{.entry = ++entries_, .now = now_};
    for (SyncShard::Answer& answer : shard_.handle(request, tokens_, now_))
      if (auto waiter = waiting_.extract(answer.token))
        handled.ready.emplace_back(std::move(waiter.mapped()), std::move(answer.reply));
    return handled;
  }

  std::mutex mutex_;
  // Guarded by mutex_:
  SyncShard shard_;
  std::unordered_map<uint64_t, Deliver> waiting_;  // by token
  uint64_t tokens_ = 0;
  uint64_t entries_ = 0;  // of the log
  double now_ = 0.0;
};

// Replies on their way to sessions of one I/O thread. A session that is gone gets none.
class Mailbox {
 public:
  struct Mail {
    uint64_t session;
    Header header;
    std::vector<Part> parts;
    std::vector<std::byte> body;
  };

  explicit Mailbox(std::function<void()> wake) : wake_(std::move(wake)) {}

  void post(Mail mail) {
    {
      const std::lock_guard lock(mutex_);
      mail_.push_back(std::move(mail));
    }
    wake_();
  }
  std::vector<Mail> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(mail_, {});
  }

 private:
  const std::function<void()> wake_;
  std::mutex mutex_;
  std::vector<Mail> mail_;  // guarded by mutex_
};

}  // namespace shoal
