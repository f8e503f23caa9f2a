// A few threads that help with large pieces of work. The caller always works too; helpers sleep when
// there is nothing to do and use no CPU.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <list>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace shoal {

class WorkCrew {
 public:
  explicit WorkCrew(size_t helpers);
  ~WorkCrew();
  WorkCrew(const WorkCrew&) = delete;
  WorkCrew& operator=(const WorkCrew&) = delete;

  // Calls item(i) for every i in [0, items), on this thread and (unless `alone`: a little work is over before
  // a helper is awake) any that are free; returns when all are done, or throws what the first item to fail
  // threw. Thread-safe; items must not call `run`.
  void run(size_t items, const std::function<void(size_t)>& item, bool alone = false);

  size_t helpers() const { return threads_.size(); }

  // Calls by this thread are from now on shared out by the OpenMP runtime at `path`, which the process must
  // have loaded: its threads wait for work by spinning, and would take the cores from helpers of our own.
  // False: it is not there, or has nobody to share with.
  bool borrow_openmp(const std::string& path);

 private:
  struct Batch {
    const std::function<void(size_t)>* item;
    size_t items;
    std::atomic<size_t> next{0};
    size_t helping = 0;                   // guarded by mutex_
    std::exception_ptr failed = nullptr;  // guarded by mutex_
  };

  void help();
  void work(Batch& batch);
  bool work_borrowed(Batch& batch);

  std::mutex mutex_;
  std::condition_variable wanted_;
  std::condition_variable left_;
  std::list<Batch*> batches_;  // guarded by mutex_
  bool stopping_ = false;      // guarded by mutex_
  std::vector<std::thread> threads_;

  // How compiled OpenMP code enters a parallel region: body, its argument, threads (0: as set), flags.
  using EnterParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
  std::atomic<EnterParallel> enter_parallel_{nullptr};
  int (*openmp_threads_)() = nullptr;  // of the thread that asks; set before enter_parallel_, as is:
  std::thread::id borrower_;
};

// Cores that this process may run on.
size_t usable_cores();

}  // namespace shoal
