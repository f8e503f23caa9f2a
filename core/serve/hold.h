// A client's part in a cut, without I/O: what it keeps back, when it may answer, and for how long it does so.
// The socket client, its pulse and the simulator run this same code. Not thread-safe.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/mutants.h"
#include "serve/client_machine.h"

namespace shoal {

// What may begin while pushes are held.
class PushGate {
 public:
  void hold() { held_ = true; }
  void release() { held_ = false; }
  bool held() const { return held_; }

  // A step that is half pushed is ended first.
  bool may_push() const { return !held_ || half_step_; }
  void pushed() { half_step_ = in_job_; }
  void step_ended(bool in_job) {
    in_job_ = in_job;
    half_step_ = false;
  }
  bool in_job() const { return in_job_; }

  bool begin_commit() {
    if (held_) return false;
    ++committing_;
    return true;
  }
  void end_commit() { --committing_; }

  // Whether all that was begun is acknowledged everywhere.
  bool still(const ClientMachine& machine) const {
    if (SHOAL_MUTANT(held_in_flight)) return true;
    return !machine.writing() && committing_ == 0 && !half_step_;
  }

 private:
  bool held_ = false;
  bool in_job_ = false;     // the client says when its steps end
  bool half_step_ = false;  // pushes of a step are begun, and its end was not sent
  size_t committing_ = 0;   // commits that begin or are waited for
};

// An order of the coordinator's to hold, and its times.
class HoldOrder {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // The gate is to be closed now; what was held by an earlier order is let go before.
  void told(uint32_t number, Time now) {
    asked_ = number;
    told_ = now;
  }
  // All must be still by then, or the gate is opened again without an answer.
  Time still_by() const { return told_ + std::chrono::milliseconds(900); }
  // It is still: the order's number is the answer.
  uint32_t kept() { return held_ = asked_; }

  bool holds(uint32_t number) const { return held_ == number; }
  bool holds() const { return held_ != 0; }
  // A hold ends by itself then. The coordinator takes no cut that began later; a lost connection does not end
  // it sooner, for the coordinator may not have seen that yet.
  Time until() const {
    return told_ + (SHOAL_MUTANT(short_hold) ? std::chrono::seconds(1) : std::chrono::seconds(2));
  }
  // True: the gate is to be opened.
  bool end() { return std::exchange(held_, 0) != 0; }

 private:
  uint32_t asked_ = 0;
  uint32_t held_ = 0;
  Time told_{};
};

}  // namespace shoal
