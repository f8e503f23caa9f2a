// What TCP and unix sockets share, and TCP. The unix side is in unix_socket.cc.
#include "net/socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cassert>
#include <cerrno>
#include <cstring>
#include <memory>

#include "net/socket_detail.h"

namespace shoal {

using socket_detail::Deadline;
using socket_detail::reason;

namespace {

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
  if (code != 0) {
    resolved.error = code == EAI_SYSTEM ? reason(errno) : gai_strerror(code);
  } else {
    resolved.addresses.reset(found);
  }
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
    if (const int error = socket_detail::wait_connected(fd, deadline); error != 0) return error;
  }
  return is_connected_to_itself(fd) ? ECONNREFUSED : 0;
}

}  // namespace

Result<Fd> listen_tcp(const std::string& host, uint16_t port) {
  const Resolved resolved = resolve(host, port, AI_PASSIVE);
  if (resolved.addresses == nullptr) {
    return Status(Code::bad_input, "can not listen on " + describe(host, port) + ": " + resolved.error);
  }
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
  if (resolved.addresses == nullptr) {
    return Status(Code::unavailable, "can not connect to " + describe(host, port) + ": " + resolved.error);
  }
  int error = EADDRNOTAVAIL;
  for (const addrinfo* address = resolved.addresses.get(); address != nullptr; address = address->ai_next) {
    Fd fd = open_socket(*address);
    const int this_error = fd.valid() ? connect_within(fd.get(), *address, deadline) : errno;
    if (this_error == 0) {
      tune(fd.get());
      return fd;
    }
    // The address that exists gives the better reason.
    if (!is_family_missing(this_error) || is_family_missing(error)) {
      error = this_error;
    }
  }
  return socket_detail::connect_error(describe(host, port), error, timeout_ms);
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
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &bytes) != 0) {
    return Status(Code::internal, "a socket has no local address: " + reason(errno));
  }
  if (address.ss_family == AF_INET) return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
  if (address.ss_family == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6&>(address).sin6_port);
  return Status(Code::internal, "only a TCP socket has a port");
}

void set_buffers(int fd, int bytes) {
  assert(bytes > 0);
  setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
  setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
}

}  // namespace shoal
