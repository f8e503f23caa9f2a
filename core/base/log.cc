#include "base/log.h"

#include <unistd.h>

#include <ctime>

namespace shoal {

void log_line(const std::string& who, const std::string& message) {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  tm parts{};
  gmtime_r(&now.tv_sec, &parts);
  char stamp[32];
  const size_t length = strftime(stamp, sizeof stamp, "%H:%M:%S ", &parts);
  // One write, so that lines of several threads do not mix.
  const std::string line = std::string(stamp, length) + who + ": " + message + "\n";
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace shoal
