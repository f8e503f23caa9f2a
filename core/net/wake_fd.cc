#include "net/wake_fd.h"

#include <sys/eventfd.h>

namespace shoal {

WakeFd::WakeFd() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

void WakeFd::wake() const {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = write(fd_.get(), &one, sizeof one);
}

void WakeFd::wait(std::vector<pollfd>& others, std::chrono::steady_clock::time_point until) const {
  using std::chrono::nanoseconds;
  const auto left = std::chrono::duration_cast<nanoseconds>(until - std::chrono::steady_clock::now()).count();
  if (left <= 0) return;
  const timespec time{.tv_sec = left / 1'000'000'000, .tv_nsec = left % 1'000'000'000};
  others.push_back({fd_.get(), POLLIN, 0});
  const int ready = ppoll(others.data(), others.size(), &time, nullptr);
  if (ready < 0)  // interrupted: nothing was looked at
    for (pollfd& each : others) each.revents = 0;
  if ((others.back().revents & POLLIN) != 0) {
    uint64_t ignored = 0;
    [[maybe_unused]] const ssize_t n = read(fd_.get(), &ignored, sizeof ignored);
  }
  others.pop_back();
}

}  // namespace shoal
