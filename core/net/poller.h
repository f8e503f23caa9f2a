// epoll and a wake-up, for one thread that waits for many descriptors.
#pragma once

#include <sys/epoll.h>

#include <array>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "net/fd.h"

namespace shoal {

class Poller {
 public:
  static Result<Poller> make();

  // Level-triggered. `tag` comes back with the events; safe from any thread.
  Status add(int fd, uint32_t events, void* tag);
  void change(int fd, uint32_t events, void* tag);
  void remove(int fd);

  // Waits up to timeout_ms (-1: for ever). A wake-up comes as an event with a null tag.
  std::span<const epoll_event> wait(int timeout_ms);
  void wake();  // from any thread

 private:
  Poller(Fd epoll, Fd event) : epoll_(std::move(epoll)), event_(std::move(event)) {}

  Fd epoll_;
  Fd event_;
  std::array<epoll_event, 64> events_{};
};

}  // namespace shoal
