#include "net/socket.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "check.h"

using namespace shoal;

namespace {

// A directory of its own for socket files; removed with what is in it.
class Directory {
 public:
  Directory() { CHECK(mkdtemp(path_.data()) != nullptr); }
  ~Directory() {
    unlink(file().c_str());
    rmdir(path_.c_str());
  }
  std::string file() const { return path_ + "/socket"; }

 private:
  std::string path_ = "/tmp/shoal-test-XXXXXX";
};

bool is_set_up(int fd) {
  return (fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0 && (fcntl(fd, F_GETFL) & O_NONBLOCK) != 0;
}

bool has_no_delay(int fd) {
  int value = 0;
  socklen_t bytes = sizeof value;
  return getsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &value, &bytes) == 0 && value != 0;
}

Fd accept_waiting(int listener) {
  pollfd waiting{listener, POLLIN, 0};
  CHECK_EQ(poll(&waiting, 1, 2000), 1);
  auto accepted = accept_connection(listener);
  CHECK(accepted.ok() && accepted->valid());
  return accepted.ok() ? std::move(*accepted) : Fd();
}

bool carries_a_byte(const Fd& from, const Fd& to) {
  const char sent = 'x';
  char received = 0;
  pollfd waiting{to.get(), POLLIN, 0};
  return send(from.get(), &sent, 1, MSG_NOSIGNAL) == 1 && poll(&waiting, 1, 2000) == 1 &&
         recv(to.get(), &received, 1, 0) == 1 && received == 'x';
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

void check_tcp_round_trip(const std::string& host) {
  const auto listener = listen_tcp(host, 0);
  REQUIRE(listener.ok());
  const auto port = local_port(listener->get());
  REQUIRE(port.ok() && *port != 0);
  const auto client = connect_tcp(host, *port, 2000);
  REQUIRE(client.ok());
  const Fd server = accept_waiting(listener->get());
  for (const int fd : {listener->get(), client->get(), server.get()}) {
    CHECK(is_set_up(fd));
  }
  CHECK(has_no_delay(client->get()) && has_no_delay(server.get()));
  CHECK(carries_a_byte(*client, server) && carries_a_byte(server, *client));
}

void check_unix_round_trip(const std::string& path) {
  const auto listener = listen_unix(path);
  REQUIRE(listener.ok());
  const auto client = connect_unix(path, 2000);
  REQUIRE(client.ok());
  const Fd server = accept_waiting(listener->get());
  for (const int fd : {listener->get(), client->get(), server.get()}) {
    CHECK(is_set_up(fd));
  }
  CHECK(carries_a_byte(*client, server) && carries_a_byte(server, *client));
  CHECK(peer_is_same_user(client->get()) && peer_is_same_user(server.get()));
}

}  // namespace

TEST(an_fd_has_one_owner) {
  Fd first(dup(0));
  const int number = first.get();
  Fd second(std::move(first));
  CHECK(!first.valid() && second.get() == number);
  second = Fd();
  CHECK(fcntl(number, F_GETFD) < 0);
}

TEST(tcp_connects_by_number_and_by_name) {
  check_tcp_round_trip("127.0.0.1");
  check_tcp_round_trip("localhost");
  if (listen_tcp("::1", 0).ok()) {  // a container may have no IPv6
    check_tcp_round_trip("::1");
  }
}

TEST(a_port_in_use_is_named) {
  const auto first = listen_tcp("127.0.0.1", 0);
  REQUIRE(first.ok());
  const uint16_t port = *local_port(first->get());
  const auto second = listen_tcp("127.0.0.1", port);
  REQUIRE(!second.ok());
  CHECK(second.status().code() == Code::bad_input);
  CHECK(contains(second.status().message(), "port " + std::to_string(port) + " on 127.0.0.1 is in use"));
}

TEST(a_port_can_be_taken_again_after_its_connections_closed) {
  auto listener = listen_tcp("127.0.0.1", 0);
  REQUIRE(listener.ok());
  const uint16_t port = *local_port(listener->get());
  {
    const auto client = connect_tcp("127.0.0.1", port, 2000);
    Fd server = accept_waiting(listener->get());
    server.reset();  // the server's end closes first and lingers in TIME_WAIT
  }
  listener->reset();
  CHECK(listen_tcp("127.0.0.1", port).ok());
}

TEST(nobody_there_is_unavailable_at_once) {
  auto listener = listen_tcp("127.0.0.1", 0);
  REQUIRE(listener.ok());
  const uint16_t port = *local_port(listener->get());
  listener->reset();
  const auto client = connect_tcp("127.0.0.1", port, 60'000);
  REQUIRE(!client.ok());
  CHECK(client.status().code() == Code::unavailable);
  CHECK(contains(client.status().message(), "port " + std::to_string(port) + " on 127.0.0.1"));
  CHECK(connect_unix("/tmp/shoal-no-such-socket", 60'000).status().code() == Code::unavailable);
}

TEST(a_connect_never_meets_itself) {
  // A connect draws its own port from the even ones of the ephemeral range, one after the other; without
  // the check in connect_tcp, trying one of those long enough meets it.
  uint16_t port = *local_port(listen_tcp("127.0.0.1", 0)->get());
  port = static_cast<uint16_t>(port & ~1);
  if (!listen_tcp("127.0.0.1", port).ok()) {
    return;  // another process has it
  }
  for (int i = 0; i < 16'000; ++i) {
    const auto client = connect_tcp("127.0.0.1", port, 1000);
    if (client.ok()) {
      CHECK(!client.ok());
      break;
    }
  }
}

TEST(an_unknown_host_is_named) {
  const auto client = connect_tcp("no-such-host.invalid", 1, 1000);
  REQUIRE(!client.ok());
  CHECK(client.status().code() == Code::unavailable);
  CHECK(contains(client.status().message(), "no-such-host.invalid"));
  CHECK(listen_tcp("no-such-host.invalid", 1).status().code() == Code::bad_input);
}

TEST(a_full_queue_ends_at_the_deadline) {
  const std::string path = "@shoal-test-full-" + std::to_string(getpid());
  const auto listener = listen_unix(path);
  REQUIRE(listener.ok());
  CHECK_EQ(listen(listener->get(), 0), 0);  // as short as the kernel allows
  std::vector<Fd> waiting;
  const auto started = std::chrono::steady_clock::now();
  auto client = connect_unix(path, 50);
  while (client.ok() && waiting.size() < 100) {
    waiting.push_back(std::move(*client));
    client = connect_unix(path, 50);
  }
  REQUIRE(!client.ok());
  CHECK(client.status().code() == Code::timeout);
  CHECK(std::chrono::steady_clock::now() - started >= std::chrono::milliseconds(50));
}

TEST(no_waiting_connection_is_no_error) {
  const auto listener = listen_tcp("127.0.0.1", 0);
  REQUIRE(listener.ok());
  const auto accepted = accept_connection(listener->get());
  CHECK(accepted.ok() && !accepted->valid());
  CHECK(!accept_connection(-1).ok());
}

TEST(unix_sockets_connect_by_file_and_by_abstract_name) {
  const Directory directory;
  check_unix_round_trip(directory.file());
  check_unix_round_trip("@shoal-test-" + std::to_string(getpid()));
}

TEST(a_socket_file_is_for_its_user_alone) {
  const Directory directory;
  const auto listener = listen_unix(directory.file());
  struct stat file = {};
  REQUIRE(listener.ok() && stat(directory.file().c_str(), &file) == 0);
  CHECK_EQ(file.st_mode & 0777, 0600);
}

TEST(a_dead_socket_file_is_replaced_and_a_live_one_is_not) {
  const Directory directory;
  auto first = listen_unix(directory.file());
  REQUIRE(first.ok());
  const auto refused = listen_unix(directory.file());
  REQUIRE(!refused.ok());
  CHECK(contains(refused.status().message(), directory.file() + " is in use"));
  CHECK(connect_unix(directory.file(), 1000).ok());
  first->reset();
  CHECK(listen_unix(directory.file()).ok());
}

TEST(a_file_that_is_no_socket_is_never_deleted) {
  const Directory directory;
  std::ofstream(directory.file()) << "precious";
  CHECK(!listen_unix(directory.file()).ok());
  std::string text;
  std::ifstream(directory.file()) >> text;
  CHECK_EQ(text, "precious");
}

TEST(bad_socket_paths_are_refused) {
  const std::string longest = "@" + std::string(107, 'x');
  CHECK(listen_unix(longest).ok());
  for (const std::string& path : {std::string(), std::string("@"), longest + "x",
                                  "/tmp/" + std::string(103, 'x'), std::string("/tmp/a\0b", 8)}) {
    CHECK(listen_unix(path).status().code() == Code::bad_input);
    CHECK(connect_unix(path, 10).status().code() == Code::bad_input);
  }
}

TEST(buffers_can_be_asked_for) {
  const auto listener = listen_tcp("127.0.0.1", 0);
  REQUIRE(listener.ok());
  set_buffers(listener->get(), 65'536);
  int bytes = 0;
  socklen_t size = sizeof bytes;
  CHECK_EQ(getsockopt(listener->get(), SOL_SOCKET, SO_RCVBUF, &bytes, &size), 0);
  CHECK(bytes >= 65'536);
}

TEST(a_tcp_peer_is_not_taken_for_a_local_user) {
  const auto listener = listen_tcp("127.0.0.1", 0);
  REQUIRE(listener.ok());
  const auto client = connect_tcp("127.0.0.1", *local_port(listener->get()), 2000);
  REQUIRE(client.ok());
  CHECK(!peer_is_same_user(client->get()));
}
