// Which edges of the compiled code an input went along, as g++'s -fsanitize-coverage=trace-pc tells it: there
// is a call at every basic block of the core's files in this target, and an edge is one block after another.
// Addresses are taken from the start of the program, so that a seed gives the same run wherever it is loaded.
#pragma once

#include <cstddef>

namespace edges {

void forget_path();  // before an input
// After an input: how many edges it went along that none did before, or so much more often than any (twice,
// four times ...) that it is worth keeping, too.
size_t count_news();
size_t count_seen();  // different edges, by all inputs

}  // namespace edges
