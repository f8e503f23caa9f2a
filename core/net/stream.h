// The one seam between the protocol and a connected socket: bytes out, bytes in, never blocking. Plain
// sockets are below it today; TLS will be another implementation, with its own state between `read` and
// the descriptor, and nothing above changes (docs/decisions/0002).
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "net/fd.h"

namespace shoal {

class Stream {
 public:
  virtual ~Stream() = default;

  virtual int fd() const = 0;  // to wait on
  // Both return as the system calls do: bytes moved, 0 at the end of the stream, or -1 with errno; EAGAIN
  // when the other end is not ready. EINTR never comes out.
  //
  // Descriptors that came along are appended to `descriptors`; the caller closes them.
  virtual ssize_t read(std::span<std::byte> buffer, std::vector<int>& descriptors) = 0;
  // `descriptor` (-1: none) goes with the first byte; it stays the caller's.
  virtual ssize_t write(std::span<const iovec> pieces, int descriptor) = 0;
};

// A tcp connection: carries no descriptors.
std::unique_ptr<Stream> make_tcp_stream(Fd socket);
// A unix connection: carries descriptors, one at a time and in front of a piece of its own.
std::unique_ptr<Stream> make_unix_stream(Fd socket);

}  // namespace shoal
