#include "base/work_crew.h"

#include <dlfcn.h>
#include <sched.h>

#include <algorithm>

namespace shoal {

size_t usable_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return static_cast<size_t>(std::max(1, CPU_COUNT(&set)));
  return std::max(1u, std::thread::hardware_concurrency());
}

WorkCrew::WorkCrew(size_t helpers) {
  threads_.reserve(helpers);
  for (size_t i = 0; i < helpers; ++i) threads_.emplace_back([this] { help(); });
}

WorkCrew::~WorkCrew() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wanted_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void WorkCrew::work(Batch& batch) {
  for (size_t i = batch.next.fetch_add(1); i < batch.items; i = batch.next.fetch_add(1)) {
    try {
      (*batch.item)(i);
    } catch (...) {  // out of memory: it fails the caller's request, not the thread that helps
      const std::lock_guard lock(mutex_);
      if (batch.failed == nullptr) batch.failed = std::current_exception();
    }
  }
}

void WorkCrew::run(size_t items, const std::function<void(size_t)>& item, bool alone) {
  if (alone || items < 2 || threads_.empty()) {
    for (size_t i = 0; i < items; ++i) item(i);
    return;
  }
  Batch batch{.item = &item, .items = items};
  if (work_borrowed(batch)) {
    if (batch.failed != nullptr) std::rethrow_exception(batch.failed);
    return;
  }
  std::unique_lock lock(mutex_);
  const auto place = batches_.insert(batches_.end(), &batch);
  lock.unlock();
  wanted_.notify_all();
  work(batch);
  lock.lock();
  batches_.erase(place);  // nobody joins any more; wait for those who did
  left_.wait(lock, [&] { return batch.helping == 0; });
  if (batch.failed != nullptr) std::rethrow_exception(batch.failed);
}

bool WorkCrew::borrow_openmp([[maybe_unused]] const std::string& path) {
#ifdef __SANITIZE_THREAD__
  return false;  // the sanitizer does not see how that runtime synchronises
#else
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return false;
  const auto enter = reinterpret_cast<EnterParallel>(dlsym(library, "GOMP_parallel"));
  openmp_threads_ = reinterpret_cast<int (*)()>(dlsym(library, "omp_get_max_threads"));
  if (enter == nullptr || openmp_threads_ == nullptr) return false;
  borrower_ = std::this_thread::get_id();
  enter_parallel_ = enter;
  return true;
#endif
}

bool WorkCrew::work_borrowed(Batch& batch) {
  const EnterParallel enter = enter_parallel_;
  if (enter == nullptr || std::this_thread::get_id() != borrower_ || openmp_threads_() < 2) return false;
  std::pair<WorkCrew*, Batch*> both{this, &batch};
  const auto body = [](void* data) {
    const auto& [crew, mine] = *static_cast<std::pair<WorkCrew*, Batch*>*>(data);
    crew->work(*mine);
  };
  enter(body, &both, 0, 0);
  return true;
}

void WorkCrew::help() {
  std::unique_lock lock(mutex_);
  for (;;) {
    Batch* batch = nullptr;
    wanted_.wait(lock, [&] {
      const auto it = std::find_if(batches_.begin(), batches_.end(),
                                   [](const Batch* b) { return b->next.load() < b->items; });
      batch = it == batches_.end() ? nullptr : *it;
      return stopping_ || batch != nullptr;
    });
    if (batch == nullptr) return;
    ++batch->helping;
    lock.unlock();
    work(*batch);
    lock.lock();
    --batch->helping;
    left_.notify_all();
  }
}

}  // namespace shoal
