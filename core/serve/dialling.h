// A connection that is being made by a thread of its own: a name may take long to resolve and a host to
// answer, and whoever pumps has other servers to see to meanwhile.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>

#include "serve/link.h"

namespace shoal {

class Dialling {
 public:
  using Dialled = Result<std::unique_ptr<Link>>;

  // The thread ends by itself, also when nobody wants the connection any more.
  static std::shared_ptr<Dialling> begin(const ServerAddress& address, std::optional<Lane> lane,
                                         const ClientIdentity& identity, Link::Clock::time_point deadline);
  // What became of it, once; none where it is under way at `until`.
  std::optional<Dialled> result(Link::Clock::time_point until = {});

 private:
  std::mutex mutex_;
  std::condition_variable done_;
  std::optional<Dialled> result_;
};

}  // namespace shoal
