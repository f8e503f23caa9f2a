// The unix half of socket.h.
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "net/socket.h"
#include "net/socket_detail.h"

namespace shoal {

using socket_detail::Deadline;
using socket_detail::reason;

namespace {

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
  if (is_abstract(path)) {
    address.name.sun_path[0] = '\0';
  } else {
    ++bytes;
  }
  address.bytes = static_cast<socklen_t>(bytes);
  return address;
}

Fd open_socket() { return Fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)); }

// True only for a socket file that refuses connections: its process is gone. A plain file refuses too,
// but is not ours to delete.
bool is_stale(const std::string& path, const UnixAddress& address) {
  struct stat file = {};
  if (lstat(path.c_str(), &file) != 0 || !S_ISSOCK(file.st_mode)) return false;
  const Fd probe = open_socket();
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

Result<Fd> listen_unix(const std::string& path) {
  const Result<UnixAddress> address = make_address(path);
  if (!address.ok()) return address.status();
  Fd fd = open_socket();
  int error = fd.valid() ? bind_replacing_stale(fd.get(), path, *address) : errno;
  if (error == EADDRINUSE) {
    return Status(Code::bad_input, "socket " + path + " is in use, or is a file that is no socket");
  }
  // Before listen: until then nobody can connect, so the file is never open to others.
  if (error == 0 && !is_abstract(path) && chmod(path.c_str(), 0600) != 0) {
    error = errno;
  }
  if (error == 0 && listen(fd.get(), SOMAXCONN) != 0) {
    error = errno;
  }
  if (error != 0) return Status(Code::bad_input, "can not listen on socket " + path + ": " + reason(error));
  return fd;
}

Result<Fd> connect_unix(const std::string& path, int timeout_ms) {
  const Deadline deadline(timeout_ms);
  const Result<UnixAddress> address = make_address(path);
  if (!address.ok()) return address.status();
  Fd fd = open_socket();
  int error = fd.valid() ? 0 : errno;
  while (error == 0 && connect(fd.get(), address->get(), address->bytes) != 0) {
    if (errno == EINPROGRESS) {
      error = socket_detail::wait_connected(fd.get(), deadline);
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
  if (error != 0) return socket_detail::connect_error("socket " + path, error, timeout_ms);
  return fd;
}

bool peer_is_same_user(int unix_fd) {
  ucred peer{};
  socklen_t bytes = sizeof peer;
  return getsockopt(unix_fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 && bytes == sizeof peer &&
         peer.uid == geteuid();
}

}  // namespace shoal
