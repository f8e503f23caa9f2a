// A shared mutex whose writers do not starve: a writer that waits stops further readers at the door, which
// the library's own (glibc prefers readers) does not promise.
#pragma once

#include <mutex>
#include <shared_mutex>

namespace shoal {

class FairSharedMutex {
 public:
  void lock() {
    const std::lock_guard door(door_);
    room_.lock();
  }
  void unlock() { room_.unlock(); }
  void lock_shared() {
    const std::lock_guard door(door_);
    room_.lock_shared();
  }
  void unlock_shared() { room_.unlock_shared(); }

 private:
  std::mutex door_;
  std::shared_mutex room_;
};

}  // namespace shoal
