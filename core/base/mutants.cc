#include "base/mutants.h"

#ifdef SHOAL_MUTANTS
#include <cstring>
#include <string>

namespace shoal {
namespace {
std::string& active() {
  static std::string name;
  return name;
}
}  // namespace

bool mutant_active(const char* name) { return active() == name; }
void set_mutant(const char* name) { active() = name; }

}  // namespace shoal
#endif
