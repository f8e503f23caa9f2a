#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <cassert>
#include <cerrno>
#include <string>
#include <system_error>

#include "net/fd.h"
#include "net/shm.h"

namespace shoal {
namespace {

constexpr int seals_needed = F_SEAL_SHRINK | F_SEAL_GROW;

std::string reason(int error) { return std::generic_category().message(error); }

// What must hold before a descriptor may be mapped; the order matters, since only the seals make the
// size that fstat sees a promise.
Result<size_t> check_descriptor(int fd, size_t bytes_max) {
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & seals_needed) != seals_needed)
    return Status(Code::refused, "shared segment is not sealed against shrinking and growing");
  // Huge-page files can fault after their owner punched a hole, whatever the seals say; plain memory
  // only gives zeros then.
  struct statfs system = {};
  if (fstatfs(fd, &system) != 0 || system.f_type == HUGETLBFS_MAGIC)
    return Status(Code::refused, "shared segment is not plain memory");
  struct stat file = {};
  if (fstat(fd, &file) != 0)
    return Status(Code::refused, "shared segment can not be examined: " + reason(errno));
  const auto size = static_cast<size_t>(file.st_size);
  if (file.st_size <= 0 || size > bytes_max) {
    return Status(Code::refused, "shared segment has " + std::to_string(file.st_size) +
                                     " bytes; allowed are 1 to " + std::to_string(bytes_max));
  }
  return size;
}

}  // namespace

Result<std::shared_ptr<Segment>> Segment::create(uint32_t id, size_t bytes) {
  if (bytes == 0) return Status(Code::bad_input, "a shared segment needs at least 1 byte");
  Fd fd(memfd_create("shoal", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return Status(Code::unavailable, "no shared memory (memfd_create): " + reason(errno));
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return Status(Code::unavailable,
                  "no shared memory of " + std::to_string(bytes) + " bytes: " + reason(errno));
  }
  // F_SEAL_SEAL too: nobody who gets the descriptor can then seal it against our own writing.
  if (fcntl(fd.get(), F_ADD_SEALS, seals_needed | F_SEAL_SEAL) != 0)
    return Status(Code::unavailable, "shared memory can not be sealed: " + reason(errno));
  return adopt(id, fd.release(), bytes);
}

Result<std::shared_ptr<Segment>> Segment::adopt(uint32_t id, int fd, size_t bytes_max) {
  Fd owned(fd);
  if (id == 0) return Status(Code::refused, "shared segment has id 0");
  const Result<size_t> size = check_descriptor(fd, bytes_max);
  if (!size.ok()) return size.status();
  void* base = mmap(nullptr, *size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) {
    return Status(Code::unavailable, "shared segment of " + std::to_string(*size) +
                                         " bytes can not be mapped: " + reason(errno));
  }
  madvise(base, *size, MADV_HUGEPAGE);  // a wish: most systems have no huge pages for shared memory
  // A local class has this function's access, which lets make_shared reach the private constructor.
  struct Made : Segment {
    Made(uint32_t name, Fd file, std::byte* start, size_t length)
        : Segment(name, std::move(file), start, length) {}
  };
  return std::shared_ptr<Segment>(
      std::make_shared<Made>(id, std::move(owned), static_cast<std::byte*>(base), *size));
}

Segment::Segment(uint32_t id, Fd fd, std::byte* base, size_t size)
    : id_(id), fd_(std::move(fd)), base_(base), size_(size) {
  assert(id != 0 && base != nullptr && size > 0);
}

Segment::~Segment() { munmap(base_, size_); }

}  // namespace shoal
