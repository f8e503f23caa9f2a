#include "net/fd_passing.h"

#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cassert>
#include <cerrno>
#include <cstring>

namespace shoal {
namespace {

void take_descriptors(const cmsghdr& control, std::vector<int>& fds) {
  const size_t count = (control.cmsg_len - CMSG_LEN(0)) / sizeof(int);
  const size_t before = fds.size();
  fds.resize(before + count);
  // By memcpy: control data has no alignment to rely on.
  std::memcpy(fds.data() + before, CMSG_DATA(&control), count * sizeof(int));
}

void close_from(std::vector<int>& fds, size_t first) {
  for (size_t i = first; i < fds.size(); ++i) close(fds[i]);
  fds.resize(first);
}

}  // namespace

ssize_t recv_with_descriptors(int socket, std::span<std::byte> buffer, std::vector<int>& fds) {
  const size_t before = fds.size();
  fds.reserve(before + descriptors_per_message_max);  // running out of memory later would leak descriptors
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(descriptors_per_message_max * sizeof(int))> control;
  iovec part{buffer.data(), buffer.size()};
  msghdr message{};
  ssize_t n;
  do {
    message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    n = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  } while (n < 0 && errno == EINTR);
  if (n < 0) return n;
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c))
    if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) take_descriptors(*c, fds);
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    close_from(fds, before);
    errno = EBADMSG;
    return -1;
  }
  return n;
}

ssize_t send_with_descriptor(int socket, std::span<const std::byte> data, int fd) {
  assert(!data.empty() && fd >= 0);  // without a byte to ride on, a stream drops the descriptor
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int))> control{};
  iovec part{const_cast<std::byte*>(data.data()), data.size()};  // sendmsg only reads it
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  ssize_t n;
  do {
    n = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (n < 0 && errno == EINTR);
  return n;
}

}  // namespace shoal
