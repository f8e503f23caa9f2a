// Descriptors over a unix socket (SCM_RIGHTS). Both calls return as the system calls do: bytes moved, 0
// at the end of the stream, or -1 with errno; EAGAIN when the socket is not ready. EINTR never comes out.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <span>
#include <vector>

namespace shoal {

// More in one message than a well-meaning peer sends.
inline constexpr size_t descriptors_per_message_max = 16;

// Reads what is there, and appends the descriptors that came with it to `fds`; the caller closes them.
// A message with more descriptors than descriptors_per_message_max gives -1 and EBADMSG; those that came
// are closed and its bytes are lost, so the connection is to be dropped. One call adds at most that
// many; how many may pile up over several is for the caller to bound.
ssize_t recv_with_descriptors(int socket, std::span<std::byte> buffer, std::vector<int>& fds);

// Writes at least one byte of `data` (which may not be empty) together with `fd`, or fails. The
// descriptor goes with the first byte: after a short count, send the rest without it. `fd` stays the
// caller's, who may close it at once.
ssize_t send_with_descriptor(int socket, std::span<const std::byte> data, int fd);

}  // namespace shoal
