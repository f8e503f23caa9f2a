// Scratch objects that are kept warm between calls. Thread-safe; must outlive what was taken from it.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

namespace shoal {

template <typename T>
class Pool {
 public:
  explicit Pool(size_t kept) : kept_(kept) { free_.reserve(kept); }

  struct GiveBack {
    Pool* pool = nullptr;
    void operator()(T* taken) const {
      std::unique_ptr<T> object(taken);  // freed after the lock is released
      const std::lock_guard lock(pool->mutex_);
      if (pool->free_.size() < pool->kept_) pool->free_.push_back(std::move(object));
    }
  };
  using Held = std::unique_ptr<T, GiveBack>;  // gives itself back

  Held take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) return {std::make_unique<T>().release(), {this}};
    Held held(free_.back().release(), {this});
    free_.pop_back();
    return held;
  }

 private:
  const size_t kept_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<T>> free_;  // guarded by mutex_
};

}  // namespace shoal
