#include "net/socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <memory>
#include <system_error>

namespace shoal {
namespace {

std::string reason(int error) { return std::generic_category().message(error); }

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
int wait_connected(int fd, const Deadline& deadline) {
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

Status connect_error(const std::string& address, int error, int timeout_ms) {
  if (error == ETIMEDOUT)
    return {Code::timeout, "no answer from " + address + " within " + std::to_string(timeout_ms) + " ms"};
  return {Code::unavailable, "can not connect to " + address + ": " + reason(error)};
}

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

// The addresses of a host, or the reason why there is none.
struct Resolved {
  Addresses addresses{nullptr, &freeaddrinfo};
  std::string error;
};

Resolved resolve(const std::string& host, uint16_t port, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int code =
      getaddrinfo(host.empty() ? nullptr : host.c_str(), std::to_string(port).c_str(), &hints, &found);
  Resolved resolved;
  if (code != 0)
    resolved.error = code == EAI_SYSTEM ? reason(errno) : gai_strerror(code);
  else
    resolved.addresses.reset(found);
  return resolved;
}

std::string describe(const std::string& host, uint16_t port) {
  return "port " + std::to_string(port) + " on " + (host.empty() ? "any interface" : host);
}

Fd open_socket(const addrinfo& address) {
  return Fd(socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, address.ai_protocol));
}

// An IPv6 address on a machine without IPv6 is no reason to give up; everything else is, or `localhost`
// would end up on the family that another process does not use.
bool is_family_missing(int error) { return error == EAFNOSUPPORT || error == EADDRNOTAVAIL; }

// 0 or the errno of the first step that failed.
int bind_and_listen(int fd, const addrinfo& address) {
  const int one = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  if (bind(fd, address.ai_addr, address.ai_addrlen) != 0 || listen(fd, SOMAXCONN) != 0) return errno;
  return 0;
}

// Small frames leave at once, and a peer that vanished without a word (power, firewall, NAT) is noticed
// within half a minute instead of a quarter of an hour. All of it fails on unix sockets, which need none.
void tune(int fd) {
  const auto set = [fd](int level, int option, int value) {
    setsockopt(fd, level, option, &value, sizeof value);
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(IPPROTO_TCP, TCP_KEEPCNT, 4);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, 30'000);
}

// A connect to a free local port in the ephemeral range can draw that very port as its own and then
// meets itself, which would hold the port against the server that is about to come back.
bool is_connected_to_itself(int fd) {
  sockaddr_storage self{};
  sockaddr_storage peer{};
  socklen_t self_bytes = sizeof self;
  socklen_t peer_bytes = sizeof peer;
  return getsockname(fd, reinterpret_cast<sockaddr*>(&self), &self_bytes) == 0 &&
         getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_bytes) == 0 && self_bytes == peer_bytes &&
         std::memcmp(&self, &peer, self_bytes) == 0;
}

int connect_within(int fd, const addrinfo& address, const Deadline& deadline) {
  if (connect(fd, address.ai_addr, address.ai_addrlen) != 0) {
    if (errno != EINPROGRESS && errno != EINTR) return errno;
    if (const int error = wait_connected(fd, deadline); error != 0) return error;
  }
  return is_connected_to_itself(fd) ? ECONNREFUSED : 0;
}

struct UnixAddress {
  sockaddr_un name{};
  socklen_t bytes = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&name); }
};

bool is_abstract(const std::string& path) { return path.starts_with('@'); }

Result<UnixAddress> make_address(const std::string& path) {
  UnixAddress address;
  address.name.sun_family = AF_UNIX;
  // A file's name ends with a zero; an abstract name begins with one, in the place of its '@'.
  const size_t length_max = sizeof address.name.sun_path - (is_abstract(path) ? 0 : 1);
  if (path.empty() || path == "@" || path.size() > length_max || path.find('\0') != std::string::npos) {
    return Status(Code::bad_input, "'" + path + "' is no socket path: it has " + std::to_string(path.size()) +
                                       " bytes, allowed are 1 to " + std::to_string(length_max) +
                                       " without zeros");
  }
  std::memcpy(address.name.sun_path, path.data(), path.size());
  size_t bytes = offsetof(sockaddr_un, sun_path) + path.size();
  if (is_abstract(path))
    address.name.sun_path[0] = '\0';
  else
    ++bytes;
  address.bytes = static_cast<socklen_t>(bytes);
  return address;
}

Fd open_unix_socket() { return Fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)); }

// True only for a socket file that refuses connections: its process is gone. A plain file refuses too,
// but is not ours to delete.
bool is_stale(const std::string& path, const UnixAddress& address) {
  struct stat file = {};
  if (lstat(path.c_str(), &file) != 0 || !S_ISSOCK(file.st_mode)) return false;
  const Fd probe = open_unix_socket();
  return probe.valid() && connect(probe.get(), address.get(), address.bytes) != 0 && errno == ECONNREFUSED;
}

// 0 or errno.
int bind_replacing_stale(int fd, const std::string& path, const UnixAddress& address) {
  if (bind(fd, address.get(), address.bytes) == 0) return 0;
  int error = errno;
  if (error == EADDRINUSE && !is_abstract(path) && is_stale(path, address)) {
    unlink(path.c_str());
    error = bind(fd, address.get(), address.bytes) == 0 ? 0 : errno;
  }
  return error;
}

}  // namespace

Result<Fd> listen_tcp(const std::string& host, uint16_t port) {
  const Resolved resolved = resolve(host, port, AI_PASSIVE);
  if (resolved.addresses == nullptr)
    return Status(Code::bad_input, "can not listen on " + describe(host, port) + ": " + resolved.error);
  int error = EADDRNOTAVAIL;
  for (const addrinfo* address = resolved.addresses.get(); address != nullptr; address = address->ai_next) {
    Fd fd = open_socket(*address);
    error = fd.valid() ? bind_and_listen(fd.get(), *address) : errno;
    if (error == 0) return fd;
    if (!is_family_missing(error)) break;
  }
  if (error == EADDRINUSE) {
    return Status(Code::bad_input,
                  describe(host, port) + " is in use; stop what listens there or choose another");
  }
  return Status(Code::bad_input, "can not listen on " + describe(host, port) + ": " + reason(error));
}

Result<Fd> connect_tcp(const std::string& host, uint16_t port, int timeout_ms) {
  const Deadline deadline(timeout_ms);
  const Resolved resolved = resolve(host, port, 0);
  if (resolved.addresses == nullptr)
    return Status(Code::unavailable, "can not connect to " + describe(host, port) + ": " + resolved.error);
  int error = EADDRNOTAVAIL;
  for (const addrinfo* address = resolved.addresses.get(); address != nullptr; address = address->ai_next) {
    Fd fd = open_socket(*address);
    const int this_error = fd.valid() ? connect_within(fd.get(), *address, deadline) : errno;
    if (this_error == 0) {
      tune(fd.get());
      return fd;
    }
    // The address that exists gives the better reason.
    if (!is_family_missing(this_error) || is_family_missing(error)) error = this_error;
  }
  return connect_error(describe(host, port), error, timeout_ms);
}

Result<Fd> accept_connection(int listener) {
  Fd fd(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!fd.valid()) {
    // Besides "none waiting": the peer gave up while it waited, which accept reports in several ways.
    const int error = errno;
    const bool about_this_process = error == EMFILE || error == ENFILE || error == ENOBUFS ||
                                    error == ENOMEM || error == EBADF || error == EINVAL || error == ENOTSOCK;
    if (about_this_process) return Status(Code::unavailable, "can not accept a connection: " + reason(error));
    return fd;
  }
  tune(fd.get());
  return fd;
}

Result<uint16_t> local_port(int fd) {
  sockaddr_storage address{};
  socklen_t bytes = sizeof address;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &bytes) != 0)
    return Status(Code::internal, "a socket has no local address: " + reason(errno));
  if (address.ss_family == AF_INET) return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
  if (address.ss_family == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6&>(address).sin6_port);
  return Status(Code::internal, "only a TCP socket has a port");
}

void set_buffers(int fd, int bytes) {
  assert(bytes > 0);
  setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
  setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
}

Result<Fd> listen_unix(const std::string& path) {
  const Result<UnixAddress> address = make_address(path);
  if (!address.ok()) return address.status();
  Fd fd = open_unix_socket();
  int error = fd.valid() ? bind_replacing_stale(fd.get(), path, *address) : errno;
  if (error == EADDRINUSE)
    return Status(Code::bad_input, "socket " + path + " is in use, or is a file that is no socket");
  // Before listen: until then nobody can connect, so the file is never open to others.
  if (error == 0 && !is_abstract(path) && chmod(path.c_str(), 0600) != 0) error = errno;
  if (error == 0 && listen(fd.get(), SOMAXCONN) != 0) error = errno;
  if (error != 0) return Status(Code::bad_input, "can not listen on socket " + path + ": " + reason(error));
  return fd;
}

Result<Fd> connect_unix(const std::string& path, int timeout_ms) {
  const Deadline deadline(timeout_ms);
  const Result<UnixAddress> address = make_address(path);
  if (!address.ok()) return address.status();
  Fd fd = open_unix_socket();
  int error = fd.valid() ? 0 : errno;
  while (error == 0 && connect(fd.get(), address->get(), address->bytes) != 0) {
    if (errno == EINPROGRESS) {
      error = wait_connected(fd.get(), deadline);
      break;
    }
    if (errno == EAGAIN) {
      // The listener's queue is full. Linux does not go on by itself then and has no event for it.
      error = deadline.left_ms() > 0 ? 0 : ETIMEDOUT;
      poll(nullptr, 0, std::min(deadline.left_ms(), 1));
    } else if (errno != EINTR) {
      error = errno;
    }
  }
  if (error != 0) return connect_error("socket " + path, error, timeout_ms);
  return fd;
}

bool peer_is_same_user(int unix_fd) {
  ucred peer{};
  socklen_t bytes = sizeof peer;
  return getsockopt(unix_fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 && bytes == sizeof peer &&
         peer.uid == geteuid();
}

}  // namespace shoal
