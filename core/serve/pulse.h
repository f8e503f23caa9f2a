// A client's own line to the coordinator that leads: a thread that never needs the caller, nor the GIL. It
// renews the client's lease, with its progress, and holds pushes back for a cut when it is told to.
//
// Records have a fixed size and no parser: little-endian numbers, as below. First the client sends a Hello
// and gets a nonce, sends its proof (net/handshake.h) and gets the coordinator's. Where there are several,
// only the one that leads answers, also each beat (by a release of order 0); one that does not is left for
// the next.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/sha256.h"
#include "base/status.h"
#include "net/fd.h"
#include "net/wake_fd.h"
#include "serve/dialling.h"
#include "serve/hold.h"
#include "serve/link.h"

namespace shoal {

struct PulseHello {
  uint32_t magic = 0x4c504853;  // "SHPL"; larger than any length with which a control message begins
  uint32_t incarnation = 0;
  uint64_t client = 0;
  Digest nonce = {};
};
static_assert(sizeof(PulseHello) == 48);

struct PulseBeat {
  enum Kind : uint32_t { alive = 1, held = 2, bye = 3 };
  uint32_t kind = alive;
  uint32_t number = 0;  // held: of the order
  uint64_t clock = 0, pushes = 0, pulls = 0;
};
static_assert(sizeof(PulseBeat) == 32);

struct PulseOrder {
  enum Kind : uint32_t { hold = 1, release = 2 };
  uint32_t kind = 0;
  uint32_t number = 0;
};
static_assert(sizeof(PulseOrder) == 8);

class Pulse {
 public:
  using Clock = std::chrono::steady_clock;
  struct Callbacks {
    std::function<PulseBeat()> progress;
    std::function<bool(Clock::time_point)> hold;  // false: not by then, and nothing is held
    std::function<void()> release;
  };

  using Coordinators = std::vector<CoordinatorAddress>;
  Pulse(Coordinators coordinators, ClientIdentity identity, Callbacks callbacks);
  // Connected when it returns; later it connects again by itself.
  static Result<std::unique_ptr<Pulse>> start(Coordinators coordinators, ClientIdentity identity,
                                              Callbacks callbacks, Clock::time_point deadline);
  ~Pulse();  // says goodbye

 private:
  struct Line {
    Fd socket;
    size_t coordinator = 0;
  };
  static Result<Fd> greet(const CoordinatorAddress& coordinator, const ClientIdentity& identity,
                          Clock::time_point answer_by, Clock::time_point welcome_by);
  static Result<Line> find_leader(const Coordinators& coordinators, size_t first,
                                  const ClientIdentity& identity, Clock::time_point deadline);
  std::shared_ptr<Dialling<Line>> begin_dialling(Clock::time_point deadline) const;
  void run();
  bool dial();                                     // false: nobody leads yet, or the thread is to end
  void listen();                                   // until the connection or the thread is to end
  bool wait(int socket, Clock::time_point until);  // true: there is something to be read
  void obey(const PulseOrder& order);
  void beat(uint32_t kind, uint32_t number = 0);
  void end_hold();

  const Coordinators coordinators_;
  const ClientIdentity identity_;
  const Callbacks callbacks_;
  const std::shared_ptr<WakeFd> wake_ = std::make_shared<WakeFd>();  // shared with who dials
  std::atomic<bool> stopping_{false};
  // Touched by thread_ only, once it runs:
  Line line_;
  HoldOrder hold_;
  Clock::time_point next_beat_{};
  std::thread thread_;
};

}  // namespace shoal
