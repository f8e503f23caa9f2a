// Numbers in messages, as short as they can be read back.
#pragma once

#include <charconv>
#include <string>

namespace shoal {

template <typename Float>
std::string number_text(Float value) {
  char buffer[32];
  return {buffer, std::to_chars(buffer, buffer + sizeof buffer, value).ptr};
}

}  // namespace shoal
