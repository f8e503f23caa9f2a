// Runs every registered test, or those whose name contains the first argument.
#include <atomic>
#include <cstdio>
#include <mutex>
#include <string_view>
#include <vector>

#include "check.h"

namespace shoal::check {
namespace {

struct Test {
  const char* name;
  const char* file;
  void (*body)();
};

// A function's static, since tests register before main and in no particular order.
std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

std::atomic<int> failures_of_test{0};

}  // namespace

bool add_test(const char* name, const char* file, void (*body)()) {
  tests().push_back({name, file, body});
  return true;
}

void fail(const char* file, int line, const std::string& message) {
  static std::mutex printing;
  const std::lock_guard lock(printing);
  ++failures_of_test;
  std::printf("%s:%d: failed: %s\n", file, line, message.c_str());
}

}  // namespace shoal::check

int main(int argc, char** argv) {
  using namespace shoal::check;
  const std::string_view wanted = argc > 1 ? argv[1] : "";
  int passed = 0;
  int failed = 0;
  for (const Test& test : tests()) {
    if (std::string_view(test.name).find(wanted) == std::string_view::npos) {
      continue;
    }
    failures_of_test = 0;
    test.body();
    if (failures_of_test == 0) {
      ++passed;
    } else {
      ++failed;
      std::printf("FAILED %s (%s)\n", test.name, test.file);
    }
    std::fflush(stdout);  // so that a crash in the next test loses nothing
  }
  // A filter that matches nothing must not look like a green run.
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 && passed > 0 ? 0 : 1;
}
