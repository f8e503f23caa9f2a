#include "serve/pulse.h"

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
constexpr auto kGrace = std::chrono::milliseconds(100);  // a thread that dials says more than its deadline
constexpr auto kAnswerTime = std::chrono::seconds(1);    // of several, for one that may not lead
constexpr auto kSilence = std::chrono::seconds(2);       // four beats
constexpr int kNoSocket = -1;

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

Pulse::Pulse(Coordinators coordinators, ClientIdentity identity, Callbacks callbacks)
    : coordinators_(std::move(coordinators)),
      identity_(std::move(identity)),
      callbacks_(std::move(callbacks)) {}

Result<std::unique_ptr<Pulse>> Pulse::start(Coordinators coordinators, ClientIdentity identity,
                                            Callbacks callbacks, Clock::time_point deadline) {
  auto pulse = std::make_unique<Pulse>(std::move(coordinators), std::move(identity), std::move(callbacks));
  auto line = pulse->begin_dialling(deadline)->result(deadline + kGrace);
  if (!line) return Status{Code::timeout, "no address of the coordinator was found in time"};
  if (!line->ok()) return line->status();
  pulse->line_ = std::move(**line);
  pulse->thread_ = std::thread([self = pulse.get()] { self->run(); });
  return pulse;
}

Pulse::~Pulse() {
  stopping_ = true;
  wake_->wake();
  if (thread_.joinable()) thread_.join();
}

Result<Fd> Pulse::greet(const CoordinatorAddress& coordinator, const ClientIdentity& identity,
                        Clock::time_point answer_by, Clock::time_point welcome_by) {
  Result<Fd> socket = connect_tcp(coordinator.host, coordinator.port, ms_left(answer_by));
  if (!socket.ok()) return socket.status();
  const int fd = socket->get();
  const PulseHello hello{
      .incarnation = identity.incarnation, .client = identity.client, .nonce = random_nonce()};
  Digest theirs{};
  Digest answer{};
  if (Status s = send_all(fd, &hello, sizeof hello); !s.ok()) return s;
  if (Status s = receive_all(fd, &theirs, sizeof theirs, answer_by); !s.ok()) return s;
  const auto prove = [&](auto proof) {
    return proof(identity.token, hello.nonce, theirs, identity.client, identity.incarnation);
  };
  const Digest ours = prove(client_proof);
  if (Status s = send_all(fd, &ours, sizeof ours); !s.ok()) return s;
  if (Status s = receive_all(fd, &answer, sizeof answer, welcome_by); !s.ok()) return s;
  if (!equal_constant_time(answer, prove(server_proof)))
    return Status{Code::refused, "the coordinator does not have our token"};
  return socket;
}

Result<Pulse::Line> Pulse::find_leader(const Coordinators& coordinators, size_t first,
                                       const ClientIdentity& identity, Clock::time_point deadline) {
  Status why;
  for (size_t i = 0; i < coordinators.size() && (i == 0 || Clock::now() < deadline); ++i) {
    const size_t at = (first + i) % coordinators.size();
    const bool one = coordinators.size() == 1;
    const auto answer_by = one ? deadline : std::min(deadline, Clock::now() + kAnswerTime);
    const auto welcome_by = one ? deadline : std::min(deadline, answer_by + kSilence);
    Result<Fd> socket = greet(coordinators[at], identity, answer_by, welcome_by);
    if (socket.ok()) return Line{std::move(*socket), at};
    why = socket.status();
  }
  if (coordinators.size() == 1) return why;
  return Status{Code::unavailable, "no coordinator leads; the last one: " + why.message()};
}

std::shared_ptr<Dialling<Pulse::Line>> Pulse::begin_dialling(Clock::time_point deadline) const {
  const auto dial = [all = coordinators_, first = line_.coordinator, who = identity_, deadline] {
    return find_leader(all, first, who, deadline);
  };
  return Dialling<Line>::begin(dial, [wake = wake_] { wake->wake(); });
}

bool Pulse::dial() {
  const auto time = kDialTime * coordinators_.size();
  const auto dialling = begin_dialling(Clock::now() + time);
  while (!stopping_) {
    if (auto line = dialling->result()) {
      if (line->ok()) line_ = std::move(**line);
      return line->ok();
    }
    wait(kNoSocket, Clock::now() + time);
  }
  return false;
}

void Pulse::run() {
  while (!stopping_) {
    try {
      if (line_.socket.valid() || dial()) listen();
    } catch (const std::bad_alloc&) {
      // Dialled again below, and by then there may be memory.
    }
    line_.socket.reset();
    if (!stopping_) wait(kNoSocket, Clock::now() + kRedialAfter);
  }
  end_hold();
}

// Also ends a hold that is over meanwhile.
bool Pulse::wait(int socket, Clock::time_point until) {
  const bool ready = wake_->wait(socket, hold_.holds() ? std::min(until, hold_.until()) : until);
  if (hold_.holds() && Clock::now() >= hold_.until()) end_hold();
  return ready;
}

void Pulse::listen() {
  next_beat_ = Clock::now();
  auto heard = next_beat_;
  for (;;) {
    if (stopping_) return beat(PulseBeat::bye);
    if (Clock::now() >= next_beat_) beat(PulseBeat::alive);
    if (!line_.socket.valid()) return;
    if (!wait(line_.socket.get(), next_beat_)) {
      if (coordinators_.size() == 1 || Clock::now() < heard + kSilence) continue;
      line_.coordinator = (line_.coordinator + 1) % coordinators_.size();
      return;
    }
    PulseOrder order;
    if (!receive_all(line_.socket.get(), &order, sizeof order, Clock::now() + kDialTime).ok()) return;
    heard = Clock::now();
    obey(order);
  }
}

void Pulse::obey(const PulseOrder& order) {
  if (order.kind == PulseOrder::release && hold_.holds(order.number)) end_hold();
  if (order.kind != PulseOrder::hold) return;
  end_hold();
  hold_.told(order.number, Clock::now());
  bool still = false;
  try {
    still = callbacks_.hold(hold_.still_by());
  } catch (const std::bad_alloc&) {
    callbacks_.release();  // it may have begun
  }
  if (still) beat(PulseBeat::held, hold_.kept());
}

void Pulse::beat(uint32_t kind, uint32_t number) {
  PulseBeat record = callbacks_.progress();
  record.kind = kind;
  record.number = number;
  if (!send_all(line_.socket.get(), &record, sizeof record).ok()) line_.socket.reset();
  next_beat_ = Clock::now() + kBeatEvery;
}

void Pulse::end_hold() {
  if (hold_.end()) callbacks_.release();
}

}  // namespace shoal
