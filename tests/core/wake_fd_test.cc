#include "net/wake_fd.h"

#include <new>

#include "check.h"
#include "failing_memory.h"
#include "serve/dialling.h"

using namespace shoal;
using Clock = std::chrono::steady_clock;

TEST(a_wait_for_one_descriptor_needs_no_memory) {
  const WakeFd wake;
  allocations_left = 0;
  const bool none = wake.wait(-1, Clock::now() + std::chrono::milliseconds(1));
  wake.wake();
  const auto start = Clock::now();
  wake.wait(-1, start + std::chrono::seconds(60));
  const bool all_left = std::exchange(allocations_left, -1) == 0;
  CHECK(!none && all_left);
  CHECK(Clock::now() < start + std::chrono::seconds(30));
}

TEST(who_dials_and_has_no_memory_says_so) {
  const auto dial = []() -> Result<int> { throw std::bad_alloc(); };
  const auto dialling = Dialling<int>::begin(dial, [] {});
  const auto result = dialling->result(Clock::now() + std::chrono::seconds(30));
  REQUIRE(result.has_value());
  CHECK(result->status().code() == Code::unavailable);
}
