// The extension module: declares and calls the bind_ functions, one file per concept.
#include <nanobind/nanobind.h>

#include "errors.h"

void bind_update(nanobind::module_& m);
void bind_store(nanobind::module_& m);
void bind_server(nanobind::module_& m);
void bind_protocol(nanobind::module_& m);

NB_MODULE(_core, m) {
  m.doc() = "Shoal's C++ core. Low level: use the `shoal` package.";
  // A client in a global variable outlives the interpreter's last collection: nothing to warn a user of.
  nanobind::set_leak_warnings(false);
  bind_errors(m);
  bind_update(m);
  bind_store(m);
  bind_server(m);
  bind_protocol(m);
}
