#include "net/wake_fd.h"

#include <sys/eventfd.h>

#include <array>

namespace shoal {

WakeFd::WakeFd() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

void WakeFd::wake() const {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = write(fd_.get(), &one, sizeof one);
}

void WakeFd::wait(std::vector<pollfd>& others, std::chrono::steady_clock::time_point until) const {
  others.emplace_back();
  poll_all(others, until);
  others.pop_back();
}

bool WakeFd::wait(int other, std::chrono::steady_clock::time_point until) const {
  std::array<pollfd, 2> both{pollfd{other, POLLIN, 0}};
  poll_all(both, until);
  return both[0].revents != 0;
}

void WakeFd::poll_all(std::span<pollfd> all, std::chrono::steady_clock::time_point until) const {
  using std::chrono::nanoseconds;
  const auto left = std::chrono::duration_cast<nanoseconds>(until - std::chrono::steady_clock::now()).count();
  if (left <= 0) return;
  const timespec time{.tv_sec = left / 1'000'000'000, .tv_nsec = left % 1'000'000'000};
  all.back() = {fd_.get(), POLLIN, 0};
  const int ready = ppoll(all.data(), all.size(), &time, nullptr);
  if (ready < 0)  // interrupted: nothing was looked at
    for (pollfd& each : all) each.revents = 0;
  if ((all.back().revents & POLLIN) != 0) {
    uint64_t ignored = 0;
    [[maybe_unused]] const ssize_t n = read(fd_.get(), &ignored, sizeof ignored);
  }
}

}  // namespace shoal
