// How one thread wakes another that waits for descriptors.
#pragma once

#include <poll.h>

#include <chrono>
#include <vector>

#include "net/fd.h"

namespace shoal {

class WakeFd {
 public:
  WakeFd();

  // From any thread: the wait that goes on ends, or else the next one.
  void wake() const;
  // Until one of `others` is ready (as their `revents` then say), until wake() or until that time.
  void wait(std::vector<pollfd>& others, std::chrono::steady_clock::time_point until) const;

 private:
  const Fd fd_;
};

}  // namespace shoal
