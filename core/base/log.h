// One line to standard error, with the time and who speaks. Servers log what they refuse and why.
#pragma once

#include <string>

namespace shoal {

void log_line(const std::string& who, const std::string& message);

}  // namespace shoal
