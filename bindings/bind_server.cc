// The server's data plane, started and stopped from Python and needing nothing of it in between.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "convert.h"
#include "py_client.h"
#include "py_server.h"

namespace nb = nanobind;
using namespace shoal;

namespace {

void make_server(PyServer* self, std::string host, uint16_t port, std::string unix_path,
                 const nb::bytes& token, uint32_t shards, size_t threads, size_t frame_bytes_max,
                 size_t connections_max, bool placed, bool weak) {
  ServerOptions options;
  options.host = std::move(host);
  options.port = port;
  options.unix_path = std::move(unix_path);
  options.token = to_bytes(token);
  options.shards = shards;
  options.threads = threads;
  options.frame_bytes_max = frame_bytes_max;
  options.connections_max = connections_max;
  options.placed = placed;
  options.weak = weak;
  new (self) PyServer{take(without_gil([&] { return Server::start(std::move(options)); }))};
}

nb::dict counters(const PyServer& self) {
  const ServerCounters& c = self.server->counters();
  return counts({{"connections", c.connections},
                 {"connections_open", c.connections_open},
                 {"refused", c.refused},
                 {"pushes", c.pushes},
                 {"duplicates", c.duplicates},
                 {"pulls", c.pulls},
                 {"rows_pushed", c.rows_pushed},
                 {"rows_pulled", c.rows_pulled},
                 {"bytes_in", c.bytes_in},
                 {"bytes_out", c.bytes_out}});
}

}  // namespace

nb::class_<PyServer> bind_server(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<PyServer> server(m, "Server");
  server
      .def("__init__", &make_server, nb::kw_only(), "host"_a, "port"_a, "unix_path"_a, "token"_a, "shards"_a,
           "threads"_a, "frame_bytes_max"_a, "connections_max"_a = 4096, "placed"_a = true, "weak"_a = false)
      .def(
          "place",
          [](PyServer& self, uint32_t index, const Placement& placement) {
            without_gil([&] { self.server->place(index, placement); });
          },
          "index"_a, "placement"_a)
      .def(
          "fill",
          [](PyServer& self, uint32_t shard, uint32_t target, uint32_t term, double timeout_s) {
            const auto deadline = deadline_in(timeout_s);
            const Status status =
                without_gil([&] { return self.server->fill(shard, target, term, deadline); });
            if (!status.ok()) raise(status);
          },
          "shard"_a, "target"_a, "term"_a, "timeout_s"_a)
      .def_prop_ro("diverged", [](const PyServer& self) { return self.server->state().diverged.load(); })
      .def_prop_ro("port", [](const PyServer& self) { return self.server->port(); })
      .def("counters", &counters)
      .def("stop", [](PyServer& self) { without_gil([&] { self.server->stop(); }); });
  return server;
}
