// A stress for TSan more than a test of results.
#include "base/work_crew.h"

#include <algorithm>
#include <new>
#include <numeric>

#include "check.h"

using namespace shoal;

TEST(every_item_is_done_once) {
  for (const size_t helpers : {0u, 1u, 3u}) {
    WorkCrew crew(helpers);
    CHECK_EQ(crew.helpers(), helpers);
    for (const size_t items : {0u, 1u, 2u, 7u, 1000u}) {
      std::vector<int> done(items);
      crew.run(items, [&](size_t i) { ++done[i]; });
      CHECK_EQ(std::accumulate(done.begin(), done.end(), size_t{0}), items);
      CHECK(std::all_of(done.begin(), done.end(), [](int n) { return n == 1; }));
    }
  }
}

TEST(several_threads_share_a_crew) {
  WorkCrew crew(2);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&crew] {
      for (size_t round = 0; round < 300; ++round) {
        std::vector<uint64_t> done(1 + round % 17);
        crew.run(done.size(), [&](size_t i) { done[i] += i + 1; });
        // What helpers wrote is visible here: run returns after them.
        const uint64_t sum = std::accumulate(done.begin(), done.end(), uint64_t{0});
        CHECK_EQ(sum, done.size() * (done.size() + 1) / 2);
      }
    });
  }
  for (std::thread& caller : callers) {
    caller.join();
  }
}

TEST(crews_come_and_go) {
  for (int i = 0; i < 50; ++i) {
    WorkCrew crew(3);
    std::atomic<int> sum{0};
    crew.run(8, [&](size_t) { ++sum; });
    CHECK_EQ(sum.load(), 8);
  }
}

TEST(this_process_may_use_a_core) { CHECK(usable_cores() >= 1); }

TEST(an_item_that_fails_fails_the_caller_only) {
  WorkCrew crew(2);
  std::atomic<int> done{0};
  for (int round = 0; round < 200; ++round) {
    bool failed = false;
    try {
      crew.run(16, [&](size_t i) {
        ++done;
        if (i % 5 == 0) throw std::bad_alloc();
      });
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    CHECK(failed);
  }
  CHECK_EQ(done.load(), 200 * 16);  // the others of the batch were done, and by helpers that live on
}
