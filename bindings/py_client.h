// The client as the binding files share it.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <string>

#include "convert.h"
#include "serve/store_client.h"

namespace shoal {

inline Deadline deadline_in(double seconds) {
  const double bounded = std::clamp(std::isnan(seconds) ? 0.0 : seconds, 0.0, 1e9);
  return std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                                std::chrono::duration<double>(bounded));
}

// A StoreClient that knows which process it belongs to: threads and connections do not survive a fork.
class PyClient {
 public:
  explicit PyClient(std::unique_ptr<StoreClient> client) : client_(std::move(client)), pid_(getpid()) {}
  ~PyClient() {
    if (getpid() != pid_) {
      // The parent's threads are not here: its object cannot be taken apart, only left alone.
      [[maybe_unused]] StoreClient* leaked = client_.release();
      return;
    }
    // Its threads may need the GIL to let go of a caller's array before they can end.
    nanobind::gil_scoped_release release;
    client_.reset();
  }

  StoreClient& use() const {
    if (getpid() != pid_) {
      raise({Code::closed, "this client belongs to process " + std::to_string(pid_) + ", this is its child " +
                               std::to_string(getpid()) + ": connect again after the fork"});
    }
    return *client_;
  }

 private:
  std::unique_ptr<StoreClient> client_;
  const pid_t pid_;
};

using PyClientPtr = std::shared_ptr<PyClient>;

// Waits with the GIL released; in slices, so that Ctrl-C is heard within one.
inline Status wait_in_slices(StoreClient& client, const StoreClient::OperationPtr& operation,
                             Deadline deadline) {
  constexpr double kSliceSeconds = 0.25;
  while (!operation->done()) {
    const Deadline slice = std::min(deadline, deadline_in(kSliceSeconds));
    const Status status = without_gil([&] { return client.wait(operation, slice); });
    if (status.code() != Code::timeout || slice == deadline) return status;
    if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
  }
  return operation->status();
}

}  // namespace shoal

// The part of the class that bind_sync.cc has.
void bind_sync(nanobind::class_<shoal::PyClient>& client);
