#include "net/stream.h"

#include <sys/socket.h>

#include <cassert>
#include <cerrno>

#include "net/fd_passing.h"

namespace shoal {
namespace {

ssize_t send_pieces(int fd, std::span<const iovec> pieces) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(pieces.data());  // sendmsg only reads it
  message.msg_iovlen = pieces.size();
  ssize_t sent = -1;
  do {
    sent = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (sent < 0 && errno == EINTR);
  return sent;
}

class TcpStream : public Stream {
 public:
  explicit TcpStream(Fd socket) : socket_(std::move(socket)) {}

  int fd() const override { return socket_.get(); }

  ssize_t read(std::span<std::byte> buffer, std::vector<int>& /*descriptors*/) override {
    ssize_t got = -1;
    do {
      got = recv(socket_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    } while (got < 0 && errno == EINTR);
    return got;
  }

  ssize_t write(std::span<const iovec> pieces, int descriptor) override {
    assert(descriptor < 0);
    static_cast<void>(descriptor);
    return send_pieces(socket_.get(), pieces);
  }

 private:
  const Fd socket_;
};

class UnixStream : public TcpStream {
 public:
  using TcpStream::TcpStream;

  ssize_t read(std::span<std::byte> buffer, std::vector<int>& descriptors) override {
    return recv_with_descriptors(fd(), buffer, descriptors);
  }

  ssize_t write(std::span<const iovec> pieces, int descriptor) override {
    if (descriptor < 0) return TcpStream::write(pieces, -1);
    assert(!pieces.empty());
    const auto* first = static_cast<const std::byte*>(pieces[0].iov_base);
    return send_with_descriptor(fd(), {first, pieces[0].iov_len}, descriptor);
  }
};

}  // namespace

std::unique_ptr<Stream> make_tcp_stream(Fd socket) { return std::make_unique<TcpStream>(std::move(socket)); }

std::unique_ptr<Stream> make_unix_stream(Fd socket) {
  return std::make_unique<UnixStream>(std::move(socket));
}

}  // namespace shoal
