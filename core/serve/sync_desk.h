// Where a job's sync shard is asked: one request at a time, and each answered once, now or when another
// request makes it ready. Thread-safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "store/sync_shard.h"
#include "wire/frame.h"

namespace shoal {

class SyncDesk {
 public:
  using Deliver = std::function<void(const SyncReply&)>;

  // `deliver` is called without locks, on this thread or on that of the request that made it ready.
  void ask(const SyncRequest& request, Deliver deliver) {
    std::vector<std::pair<Deliver, SyncReply>> ready;
    {
      const std::lock_guard lock(mutex_);
      waiting_.emplace(++tokens_, std::move(deliver));
      const std::chrono::duration<double> now = std::chrono::steady_clock::now().time_since_epoch();
      for (SyncShard::Answer& answer : shard_.handle(request, tokens_, now.count()))
        ready.emplace_back(std::move(waiting_.extract(answer.token).mapped()), std::move(answer.reply));
    }
    for (const auto& [call, reply] : ready) call(reply);
  }

  std::pair<std::vector<std::byte>, std::vector<uint64_t>> image() {
    const std::lock_guard lock(mutex_);
    return {shard_.encode(), shard_.clocks()};
  }
  // False: these bytes are no sync shard, or somebody waits at this desk.
  bool decode(std::span<const std::byte> in) {
    const std::lock_guard lock(mutex_);
    return waiting_.empty() && shard_.decode(in);
  }

 private:
  std::mutex mutex_;
  // Guarded by mutex_:
  SyncShard shard_;
  std::unordered_map<uint64_t, Deliver> waiting_;  // by token
  uint64_t tokens_ = 0;
};

// Replies on their way to sessions of one I/O thread. A session that is gone gets none.
class Mailbox {
 public:
  struct Mail {
    uint64_t session;
    Header header;
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
