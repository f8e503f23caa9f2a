// A connection that is being made by a thread of its own: a name may take long to resolve and a host to
// answer, and whoever wants the connection has other things to see to meanwhile.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "base/status.h"

namespace shoal {

template <typename Connection>
class Dialling {
 public:
  using Clock = std::chrono::steady_clock;
  using Dialled = Result<Connection>;

  // The thread ends by itself, also when nobody wants the connection any more: both own what they use. `done`
  // is called when there is a result.
  static std::shared_ptr<Dialling> begin(std::function<Dialled()> dial, std::function<void()> done) {
    auto dialling = std::make_shared<Dialling>();
    try {
      std::thread([=] {
        try {
          dialling->end(dial());
        } catch (const std::bad_alloc&) {
          dialling->end(Status{Code::unavailable, "out of memory"});
        }
        done();
      }).detach();
    } catch (const std::system_error& error) {
      dialling->end(Status{Code::unavailable, std::string("no thread to dial with: ") + error.what()});
    }
    return dialling;
  }

  // What became of it, once; none where it is under way at `until`.
  std::optional<Dialled> result(Clock::time_point until = {}) {
    std::unique_lock lock(mutex_);
    if (until > Clock::time_point{}) done_.wait_until(lock, until, [this] { return result_.has_value(); });
    return std::exchange(result_, std::nullopt);
  }

 private:
  void end(Dialled dialled) {
    const std::lock_guard lock(mutex_);
    result_.emplace(std::move(dialled));
    done_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable done_;
  std::optional<Dialled> result_;
};

}  // namespace shoal
