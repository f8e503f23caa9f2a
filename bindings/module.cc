// The extension module: declares and calls the bind_ functions, one file per concept.
#include <nanobind/nanobind.h>

#include "errors.h"
#include "py_client.h"
#include "py_server.h"

void bind_update(nanobind::module_& m);
nanobind::class_<shoal::PyClient> bind_store(nanobind::module_& m);
nanobind::class_<PyServer> bind_server(nanobind::module_& m);
void bind_image(nanobind::module_& m, nanobind::class_<shoal::PyClient>& client,
                nanobind::class_<PyServer>& server);
#ifdef SHOAL_TESTING  // tests/bindings
void bind_kernels(nanobind::module_& m);
void bind_protocol(nanobind::module_& m);
#endif

NB_MODULE(_core, m) {
  m.doc() = "Shoal's C++ core. Low level: use the `shoal` package.";
  // A client in a global variable outlives the interpreter's last collection: nothing to warn a user of.
  nanobind::set_leak_warnings(false);
  bind_errors(m);
  bind_update(m);
  auto client = bind_store(m);
  auto server = bind_server(m);
  bind_image(m, client, server);
#ifdef SHOAL_TESTING
  bind_kernels(m);
  bind_protocol(m);
#endif
}
