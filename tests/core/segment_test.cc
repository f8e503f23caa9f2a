#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>

#include "check.h"
#include "net/fd.h"
#include "net/shm.h"

using namespace shoal;

namespace {

Fd memory(off_t bytes, int seals) {
  Fd fd(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  CHECK_EQ(ftruncate(fd.get(), bytes), 0);
  if (seals != 0) {
    CHECK_EQ(fcntl(fd.get(), F_ADD_SEALS, seals), 0);
  }
  return fd;
}

bool is_open(int fd) { return fcntl(fd, F_GETFD) >= 0; }

// Adopts and tells whether it was refused and the descriptor closed.
bool refuses_and_closes(Fd fd, size_t bytes_max) {
  const int number = fd.release();
  const auto adopted = Segment::adopt(1, number, bytes_max);
  return !adopted.ok() && adopted.status().code() == Code::refused && !is_open(number);
}

}  // namespace

TEST(a_segment_is_sealed_and_closed_on_exec) {
  const auto segment = Segment::create(5, 10'000);
  REQUIRE(segment.ok());
  const int fd = (*segment)->fd();
  CHECK_EQ((*segment)->id(), 5);
  CHECK_EQ((*segment)->bytes().size(), 10'000);
  CHECK_EQ(fcntl(fd, F_GET_SEALS), F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  CHECK_EQ(fcntl(fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  CHECK(ftruncate(fd, 100) != 0);
  CHECK(ftruncate(fd, 100'000) != 0);
}

TEST(both_ends_see_the_same_bytes) {
  const auto ours = Segment::create(1, 4096);
  REQUIRE(ours.ok());
  const auto theirs = Segment::adopt(9, dup((*ours)->fd()), 4096);
  REQUIRE(theirs.ok());
  CHECK_EQ((*theirs)->id(), 9);
  CHECK((*ours)->bytes().data() != (*theirs)->bytes().data());
  (*ours)->bytes()[4095] = std::byte{42};
  CHECK((*theirs)->bytes()[4095] == std::byte{42});
}

TEST(a_segment_closes_its_descriptor) {
  auto segment = Segment::create(1, 4096);
  REQUIRE(segment.ok());
  const int fd = (*segment)->fd();
  *segment = nullptr;
  CHECK(!is_open(fd));
}

TEST(a_descriptor_that_could_change_its_size_is_refused) {
  CHECK(refuses_and_closes(memory(4096, 0), 4096));
  CHECK(refuses_and_closes(memory(4096, F_SEAL_SHRINK), 4096));
  CHECK(refuses_and_closes(memory(4096, F_SEAL_GROW), 4096));
  CHECK(!refuses_and_closes(memory(4096, F_SEAL_GROW | F_SEAL_SHRINK), 4096));
}

TEST(a_segment_of_the_wrong_size_is_refused) {
  constexpr int seals = F_SEAL_SHRINK | F_SEAL_GROW;
  CHECK(refuses_and_closes(memory(0, seals), 4096));
  CHECK(refuses_and_closes(memory(4097, seals), 4096));
  CHECK(!refuses_and_closes(memory(1, seals), 4096));
}

TEST(a_descriptor_that_is_no_memory_is_refused) {
  std::array<int, 2> pipes{};
  REQUIRE(pipe(pipes.data()) == 0);
  const Fd writer(pipes[1]);
  CHECK(refuses_and_closes(Fd(pipes[0]), 4096));
  CHECK(refuses_and_closes(Fd(open("/dev/zero", O_RDWR | O_CLOEXEC)), 4096));
  CHECK(!Segment::adopt(1, -1, 4096).ok());
}

TEST(a_segment_that_may_not_be_written_gives_an_error) {
  const int fd = memory(4096, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE).release();
  CHECK(!Segment::adopt(1, fd, 4096).ok());
  CHECK(!is_open(fd));
}

TEST(id_0_and_no_bytes_are_errors) {
  CHECK(!Segment::create(1, 0).ok());
  CHECK(!Segment::create(0, 4096).ok());
}
