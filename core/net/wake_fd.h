// How one thread wakes another that waits for descriptors.
#pragma once

#include <poll.h>

#include <chrono>
#include <span>
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
  // Until `other` is ready to be read, or negative: there is none. True: it is. Needs no memory.
  bool wait(int other, std::chrono::steady_clock::time_point until) const;

 private:
  // The last of `all` is for the descriptor of this one.
  void poll_all(std::span<pollfd> all, std::chrono::steady_clock::time_point until) const;

  const Fd fd_;
};

}  // namespace shoal
