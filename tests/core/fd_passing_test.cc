#include "net/fd_passing.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <vector>

#include "check.h"
#include "net/fd.h"
#include "net/shm.h"

using namespace shoal;

namespace {

struct Pair {
  Fd left;
  Fd right;
};

Pair make_pair() {
  std::array<int, 2> ends{-1, -1};
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
  return {Fd(ends[0]), Fd(ends[1])};
}

constexpr std::array<std::byte, 3> payload{std::byte{1}, std::byte{2}, std::byte{3}};

int count_open_descriptors() {
  int open = 0;
  for (int fd = 0; fd < 1024; ++fd) {
    open += fcntl(fd, F_GETFD) >= 0 ? 1 : 0;
  }
  return open;
}

// Sends one byte with `count` copies of `fd`, as no call of ours does.
void send_many(int socket, int fd, size_t count) {
  std::byte byte{};
  iovec part{&byte, 1};
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(64 * sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = CMSG_SPACE(count * sizeof(int));
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(count * sizeof(int));
  const std::vector<int> fds(count, fd);
  std::memcpy(CMSG_DATA(header), fds.data(), count * sizeof(int));
  CHECK_EQ(sendmsg(socket, &message, MSG_NOSIGNAL), 1);
}

}  // namespace

TEST(a_segment_passes_between_sockets) {
  const Pair pair = make_pair();
  const auto ours = Segment::create(1, 4096);
  REQUIRE(ours.ok());
  (*ours)->bytes()[100] = std::byte{77};
  CHECK_EQ(send_with_descriptor(pair.left.get(), payload, (*ours)->fd()), 3);
  std::array<std::byte, 16> buffer;
  std::vector<int> fds;
  CHECK_EQ(recv_with_descriptors(pair.right.get(), buffer, fds), 3);
  CHECK_EQ(std::memcmp(buffer.data(), payload.data(), payload.size()), 0);
  REQUIRE(fds.size() == 1);
  CHECK_EQ(fcntl(fds[0], F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  const auto theirs = Segment::adopt(1, fds[0], 4096);
  REQUIRE(theirs.ok());
  CHECK((*theirs)->bytes()[100] == std::byte{77});
}

TEST(plain_bytes_bring_no_descriptor) {
  const Pair pair = make_pair();
  CHECK_EQ(send(pair.left.get(), payload.data(), payload.size(), 0), 3);
  std::array<std::byte, 2> buffer;
  std::vector<int> fds;
  CHECK_EQ(recv_with_descriptors(pair.right.get(), buffer, fds), 2);
  CHECK_EQ(recv_with_descriptors(pair.right.get(), buffer, fds), 1);
  CHECK(fds.empty());
}

TEST(an_empty_and_a_closed_socket_answer_like_the_system_call) {
  Pair pair = make_pair();
  std::array<std::byte, 2> buffer;
  std::vector<int> fds;
  CHECK_EQ(recv_with_descriptors(pair.right.get(), buffer, fds), -1);
  CHECK_EQ(errno, EAGAIN);
  pair.left.reset();
  CHECK_EQ(recv_with_descriptors(pair.right.get(), buffer, fds), 0);
  CHECK_EQ(send_with_descriptor(pair.right.get(), payload, 0), -1);
  CHECK_EQ(errno, EPIPE);
}

TEST(sending_to_a_full_socket_does_not_block) {
  const Pair pair = make_pair();
  ssize_t n = 0;
  while (n >= 0) {
    n = send_with_descriptor(pair.left.get(), payload, pair.left.get());
  }
  CHECK(errno == EAGAIN || errno == ETOOMANYREFS);
}

TEST(as_many_descriptors_as_allowed_arrive) {
  const Pair pair = make_pair();
  send_many(pair.left.get(), 0, descriptors_per_message_max);
  std::array<std::byte, 2> buffer;
  std::vector<int> fds;
  CHECK_EQ(recv_with_descriptors(pair.right.get(), buffer, fds), 1);
  CHECK_EQ(fds.size(), descriptors_per_message_max);
  for (const int fd : fds) {
    close(fd);
  }
}

TEST(too_many_descriptors_are_closed_and_reported) {
  const Pair pair = make_pair();
  send_many(pair.left.get(), 0, 64);
  const int open_before = count_open_descriptors();
  std::array<std::byte, 2> buffer;
  std::vector<int> fds{-7};
  CHECK_EQ(recv_with_descriptors(pair.right.get(), buffer, fds), -1);
  CHECK_EQ(errno, EBADMSG);
  CHECK(fds == std::vector<int>{-7});
  CHECK_EQ(count_open_descriptors(), open_before);
}
