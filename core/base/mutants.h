// Deliberate bugs for the tests of the tests. `SHOAL_MUTANT(name)` is `false` at compile time in every
// ordinary build; a build with -DSHOAL_MUTANTS=ON can switch one on at run time, and the simulator must
// then find it.
#pragma once

#ifdef SHOAL_MUTANTS
#include <string>
namespace shoal {
inline std::string mutant;  // "": none
}  // namespace shoal
#define SHOAL_MUTANT(name) (::shoal::mutant == #name)
#else
#define SHOAL_MUTANT(name) false
#endif
