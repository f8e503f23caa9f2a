#include "serve/pulse.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "net/handshake.h"
#include "net/socket.h"

namespace shoal {
namespace {

constexpr auto kBeatEvery = std::chrono::milliseconds(500);
constexpr auto kRedialAfter = std::chrono::milliseconds(250);
constexpr auto kDialTime = std::chrono::seconds(2);
constexpr auto kHoldTime = std::chrono::milliseconds(900);
// A hold ends by itself after this. The coordinator takes no cut that began later; a lost connection does not
// end it sooner, for the coordinator may not have seen that yet.
constexpr auto kHeldAtMost = std::chrono::seconds(2);

int ms_left(Pulse::Clock::time_point until) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Pulse::Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 60'000));
}

Status send_all(int fd, const void* data, size_t bytes) {
  // Records are far smaller than any socket's buffer: one that takes none has not been read for minutes.
  const ssize_t sent = send(fd, data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent == static_cast<ssize_t>(bytes)) return {};
  return {Code::unavailable, "the coordinator does not take our pulse"};
}

Status receive_all(int fd, void* data, size_t bytes, Pulse::Clock::time_point deadline) {
  auto* to = static_cast<std::byte*>(data);
  while (bytes > 0) {
    const ssize_t got = recv(fd, to, bytes, MSG_DONTWAIT);
    if (got == 0) return {Code::unavailable, "the coordinator closed the connection of our pulse"};
    if (got > 0) {
      to += got;
      bytes -= static_cast<size_t>(got);
      continue;
    }
    if (errno != EAGAIN && errno != EINTR) return {Code::unavailable, strerror(errno)};
    pollfd wait{fd, POLLIN, 0};
    if (poll(&wait, 1, ms_left(deadline)) == 0 && Pulse::Clock::now() >= deadline)
      return {Code::timeout, "the coordinator does not answer our pulse"};
  }
  return {};
}

}  // namespace

Pulse::Pulse(std::string host, uint16_t port, ClientIdentity identity, Callbacks callbacks)
    : host_(std::move(host)),
      port_(port),
      identity_(std::move(identity)),
      callbacks_(std::move(callbacks)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

Result<std::unique_ptr<Pulse>> Pulse::start(std::string host, uint16_t port, ClientIdentity identity,
                                            Callbacks callbacks, Clock::time_point deadline) {
  auto pulse = std::make_unique<Pulse>(std::move(host), port, std::move(identity), std::move(callbacks));
  if (Status status = pulse->dial(deadline); !status.ok()) return status;
  pulse->thread_ = std::thread([self = pulse.get()] { self->run(); });
  return pulse;
}

Pulse::~Pulse() {
  stopping_ = true;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = write(wake_.get(), &one, sizeof one);
  if (thread_.joinable()) thread_.join();
}

Status Pulse::dial(Clock::time_point deadline) {
  Result<Fd> socket = connect_tcp(host_, port_, ms_left(deadline));
  if (!socket.ok()) return socket.status();
  const int fd = socket->get();
  const PulseHello hello{
      .incarnation = identity_.incarnation, .client = identity_.client, .nonce = random_nonce()};
  Digest theirs{};
  Digest answer{};
  if (Status s = send_all(fd, &hello, sizeof hello); !s.ok()) return s;
  if (Status s = receive_all(fd, &theirs, sizeof theirs, deadline); !s.ok()) return s;
  const auto prove = [&](auto proof) {
    return proof(identity_.token, hello.nonce, theirs, identity_.client, identity_.incarnation);
  };
  const Digest ours = prove(client_proof);
  if (Status s = send_all(fd, &ours, sizeof ours); !s.ok()) return s;
  if (Status s = receive_all(fd, &answer, sizeof answer, deadline); !s.ok()) return s;
  if (!equal_constant_time(answer, prove(server_proof)))
    return {Code::refused, "the coordinator does not have our token"};
  socket_ = std::move(*socket);
  return {};
}

void Pulse::run() {
  while (!stopping_) {
    if (socket_.valid() || dial(Clock::now() + kDialTime).ok()) listen();
    socket_.reset();
    if (stopping_) break;
    pollfd wait{wake_.get(), POLLIN, 0};
    poll(&wait, 1, static_cast<int>(kRedialAfter.count()));
    if (held_ != 0 && Clock::now() >= held_until_) end_hold();
  }
  end_hold();
}

void Pulse::listen() {
  next_beat_ = Clock::now();
  for (;;) {
    if (stopping_) return beat(PulseBeat::bye);
    const auto now = Clock::now();
    if (held_ != 0 && now >= held_until_) end_hold();
    if (now >= next_beat_) beat(PulseBeat::alive);
    if (!socket_.valid()) return;
    pollfd fds[] = {{wake_.get(), POLLIN, 0}, {socket_.get(), POLLIN, 0}};
    poll(fds, 2, ms_left(held_ != 0 ? std::min(next_beat_, held_until_) : next_beat_));
    if (fds[1].revents == 0) continue;
    PulseOrder order;
    if (!receive_all(socket_.get(), &order, sizeof order, Clock::now() + kDialTime).ok()) return;
    obey(order);
  }
}

void Pulse::obey(const PulseOrder& order) {
  if (order.kind == PulseOrder::release && order.number == held_) end_hold();
  if (order.kind != PulseOrder::hold) return;
  const auto now = Clock::now();
  end_hold();
  if (!callbacks_.hold(now + kHoldTime)) return;
  held_ = order.number;
  held_until_ = now + kHeldAtMost;
  beat(PulseBeat::held, order.number);
}

void Pulse::beat(uint32_t kind, uint32_t number) {
  PulseBeat record = callbacks_.progress();
  record.kind = kind;
  record.number = number;
  if (!send_all(socket_.get(), &record, sizeof record).ok()) socket_.reset();
  next_beat_ = Clock::now() + kBeatEvery;
}

void Pulse::end_hold() {
  if (std::exchange(held_, 0) != 0) callbacks_.release();
}

}  // namespace shoal
