#include "net/poller.h"

#include <sys/eventfd.h>

#include <cerrno>
#include <cstring>
#include <string>

namespace shoal {

Result<Poller> Poller::make() {
  Fd epoll(epoll_create1(EPOLL_CLOEXEC));
  Fd event(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll.valid() || !event.valid())
    return Status{Code::internal, std::string("epoll: ") + strerror(errno)};
  Poller poller(std::move(epoll), std::move(event));
  if (Status status = poller.add(poller.event_.get(), EPOLLIN, nullptr); !status.ok()) return status;
  return poller;
}

Status Poller::add(int fd, uint32_t events, void* tag) {
  epoll_event event{.events = events, .data = {.ptr = tag}};
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
    return {Code::internal, std::string("epoll_ctl: ") + strerror(errno)};
  return {};
}

void Poller::change(int fd, uint32_t events, void* tag) {
  epoll_event event{.events = events, .data = {.ptr = tag}};
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void Poller::remove(int fd) { epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr); }

std::span<const epoll_event> Poller::wait(int timeout_ms) {
  const int count = epoll_wait(epoll_.get(), events_.data(), static_cast<int>(events_.size()), timeout_ms);
  if (count <= 0) return {};
  for (int i = 0; i < count; ++i) {
    if (events_[static_cast<size_t>(i)].data.ptr == nullptr) {
      uint64_t ignored = 0;
      [[maybe_unused]] const ssize_t n = read(event_.get(), &ignored, sizeof ignored);
    }
  }
  return {events_.data(), static_cast<size_t>(count)};
}

void Poller::wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = write(event_.get(), &one, sizeof one);
}

}  // namespace shoal
