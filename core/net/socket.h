// Sockets as the core uses them: stream, non-blocking, closed on exec, owned by an Fd. Nothing here
// loops over data or keeps state; a message names the address and the reason.
//
// A unix path that begins with '@' is an abstract name: no file, gone with its last descriptor, and no
// permissions either: any user of the host can connect to it, so ask peer_is_same_user.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"
#include "net/fd.h"

namespace shoal {

// Listens on the first address that `host` ("" is every interface) resolves to; port 0 takes a free one,
// see local_port. bad_input when the address can not be had.
Result<Fd> listen_tcp(const std::string& host, uint16_t port);

// Listens on a socket file that only this user can connect to. A file left by a process that died is
// replaced; one that somebody listens on, or that is no socket, never is. The file stays when the
// listener is closed. Two processes that take over the same dead file at the same instant may both
// believe they have it: give each server its own path.
Result<Fd> listen_unix(const std::string& path);

// Connects, waiting at most `timeout_ms` for the peer (resolving a name may take longer). Blocks the
// calling thread. unavailable: try again later; timeout: the peer did not answer in time.
Result<Fd> connect_tcp(const std::string& host, uint16_t port, int timeout_ms);
Result<Fd> connect_unix(const std::string& path, int timeout_ms);

// The next waiting connection; an Fd that is not valid() when none is waiting. An error is about this
// process (out of descriptors) and lasts: stop polling the listener for a while.
Result<Fd> accept_connection(int listener);

// The port a TCP socket is bound to.
Result<uint16_t> local_port(int fd);

// Asks for socket buffers of this many bytes each way. A wish: the kernel has its own maximum.
void set_buffers(int fd, int bytes);

// Whether the process at the other end of a unix socket ran as this process's user when it connected.
bool peer_is_same_user(int unix_fd);

}  // namespace shoal
