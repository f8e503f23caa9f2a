#include "serve/dialling.h"

#include <system_error>
#include <thread>
#include <utility>

namespace shoal {

std::shared_ptr<Dialling> Dialling::begin(const ServerAddress& address, std::optional<Lane> lane,
                                          const ClientIdentity& identity, Link::Clock::time_point deadline) {
  auto dialling = std::make_shared<Dialling>();
  const auto dial = [=] {
    Dialled dialled = Link::dial(address, lane, identity, deadline);
    const std::lock_guard lock(dialling->mutex_);
    dialling->result_.emplace(std::move(dialled));
    dialling->done_.notify_all();
  };
  try {
    std::thread(dial).detach();
  } catch (const std::system_error& error) {
    dialling->result_.emplace(
        Status{Code::unavailable, address.name() + ": no thread to dial it with: " + error.what()});
  }
  return dialling;
}

std::optional<Dialling::Dialled> Dialling::result(Link::Clock::time_point until) {
  std::unique_lock lock(mutex_);
  if (until > Link::Clock::time_point{})
    done_.wait_until(lock, until, [this] { return result_.has_value(); });
  return std::exchange(result_, std::nullopt);
}

}  // namespace shoal
