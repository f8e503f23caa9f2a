// Memory that runs out when a test wants it to: the whole test program allocates by failing_memory.cc.
#pragma once

#include <cstdint>

namespace shoal {

// How many more allocations of this thread succeed before one fails; negative: all of them.
inline thread_local int64_t allocations_left = -1;

}  // namespace shoal
