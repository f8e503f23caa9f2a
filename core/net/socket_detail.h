// What socket.cc and unix_socket.cc share; not for others.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <string>
#include <system_error>

#include "base/status.h"

namespace shoal::socket_detail {

inline std::string reason(int error) { return std::generic_category().message(error); }

class Deadline {
 public:
  explicit Deadline(int timeout_ms) : at_(Clock::now() + std::chrono::milliseconds(timeout_ms)) {}

  // Rounded up, so that a wait never ends just before the deadline; 0 once it has passed.
  int left_ms() const {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(at_ - Clock::now()).count();
    return static_cast<int>(std::max<decltype(left)>(left, 0));
  }

 private:
  using Clock = std::chrono::steady_clock;
  const Clock::time_point at_;
};

// Waits for a connect under way. 0, the connection's errno, or ETIMEDOUT at the deadline.
inline int wait_connected(int fd, const Deadline& deadline) {
  pollfd waiting{fd, POLLOUT, 0};
  int n;
  do {
    n = poll(&waiting, 1, deadline.left_ms());
  } while (n < 0 && errno == EINTR);
  if (n == 0) return ETIMEDOUT;
  int error = 0;
  socklen_t bytes = sizeof error;
  if (n < 0 || getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &bytes) != 0) return errno;
  return error;
}

inline Status connect_error(const std::string& address, int error, int timeout_ms) {
  if (error == ETIMEDOUT) {
    return {Code::timeout, "no answer from " + address + " within " + std::to_string(timeout_ms) + " ms"};
  }
  return {Code::unavailable, "can not connect to " + address + ": " + reason(error)};
}

}  // namespace shoal::socket_detail
