// Client, Ticket and the settings of tables. Convert, release the GIL, call, convert.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "convert.h"
#include "py_client.h"

namespace nb = nanobind;
using namespace shoal;

namespace {

using Keys = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using Out = nb::ndarray<float, nb::c_contig, nb::device::cpu>;

std::optional<Lane> parse_lane(const std::string& name) {
  if (name == "auto") return std::nullopt;
  for (const Lane lane : {Lane::shm, Lane::unix_socket, Lane::tcp})
    if (name == lane_name(lane)) return lane;
  raise({Code::bad_input, "lane '" + name + "' is not one of auto, shm, unix, tcp"});
}

// One operation in flight. The client lives at least as long.
struct Ticket {
  std::shared_ptr<PyClient> client;
  StoreClient::OperationPtr operation;
};

// A Python object that C++ keeps, and may let go of on any thread.
std::shared_ptr<void> keep_object(nb::object object) {
  PyObject* raw = object.release().ptr();
  return {raw, [](PyObject* p) {
            // While the interpreter is being taken down nobody may ask for the GIL: leak it then.
            if (Py_IsInitialized() != 0 && _Py_IsFinalizing() == 0) {
              const nb::gil_scoped_acquire acquire;
              Py_DECREF(p);
            }
          }};
}

// Runs `call` without the GIL and makes a ticket of what it gives.
template <typename Call>
Ticket start(const PyClientPtr& self, Call call) {
  StoreClient& client = self->use();
  return {self, take(without_gil([&] { return call(client); }))};
}

void check_count(const char* verb, size_t keys) {
  if (keys > 0xffffffffu) {
    raise({Code::bad_input,
           std::string("a ") + verb + " of " + std::to_string(keys) + " keys; at most 2**32 - 1 at once"});
  }
}

// Without keys: a tensor. Rows may still be written to `out` after the ticket is dropped: it is kept.
PullItem pull_item(uint32_t table, const std::optional<Keys>& keys, const std::optional<Out>& out) {
  PullItem item{.table = table};
  if (keys) item.keys = std::span(keys->data(), keys->size());
  if (keys) check_count("pull", keys->size());
  if (out) item.out = {{out->data(), out->size()}, keep_object(nb::cast(*out))};
  return item;
}

Ticket pull_items(const PyClientPtr& self, std::vector<PullItem> items, const std::string& codec,
                  double timeout_s) {
  const Codec wire = codec_names.parse(codec);
  return start(self, [&](StoreClient& client) { return client.pull(items, wire, deadline_in(timeout_s)); });
}

PushItem push_item(uint32_t table, const std::optional<Keys>& keys, const Floats& values, float lr) {
  PushItem item{.table = table, .is_tensor = !keys, .values = {values.data(), values.size()}, .lr = lr};
  if (!keys) return item;
  check_count("push", keys->size());
  if (keys->size() > 0 && (values.ndim() != 2 || values.shape(0) != keys->size()))
    raise({Code::bad_input, std::to_string(keys->size()) + " keys need as many rows of values"});
  item.keys = {keys->data(), keys->size()};
  return item;
}

Ticket push_items(const PyClientPtr& self, std::vector<PushItem> items, const PushOptions& options,
                  double timeout_s) {
  return start(self, [&](StoreClient& client) {
    return client.push(std::move(items), options, deadline_in(timeout_s));
  });
}

nb::object rows_of(const StoreClient::OperationPtr& operation) {
  if (!operation->pulls.empty()) {
    nb::list all;
    for (const auto& one : operation->pulls) all.append(rows_of(one));
    return all;
  }
  if (operation->block == nullptr) return nb::none();  // a push, or the caller's own memory
  const std::array<size_t, 2> shape{operation->rows, operation->row_floats};
  const size_t flat = operation->spec->dense ? 1 : 0;
  return nb::cast(
      nb::ndarray<nb::numpy, float>(operation->out, 2 - flat, shape.data() + flat, capsule_of(operation)));
}

nb::object wait_for(Ticket& ticket, double timeout_s) {
  StoreClient& client = ticket.client->use();
  check(wait_in_slices(client, ticket.operation, deadline_in(timeout_s)));
  return rows_of(ticket.operation);
}

void make_placement(Placement* self, uint32_t version, bool weak, std::vector<ServerAddress> servers,
                    const std::vector<uint32_t>& terms, std::vector<std::vector<uint32_t>> chains) {
  bool sound =
      !servers.empty() && !chains.empty() && chains.size() <= kShardsMax && terms.size() == chains.size();
  for (const auto& chain : chains) {
    sound = sound && !chain.empty() &&
            std::all_of(chain.begin(), chain.end(), [&](uint32_t index) { return index < servers.size(); });
  }
  if (!sound)
    raise({Code::bad_input, "the placement names a server that is not in the list, or none at all"});
  new (self) Placement{version, weak, std::move(servers), {}, {}};
  for (size_t i = 0; i < chains.size(); ++i) self->shards.push_back({terms[i], std::move(chains[i])});
}

void bind_specs(nb::module_& m) {
  nb::class_<TableSpec>(m, "TableSpec")
      .def(nb::init<>())
      .def_rw("id", &TableSpec::id)
      .def_rw("generation", &TableSpec::generation)
      .def_rw("name", &TableSpec::name)
      .def_rw("dim", &TableSpec::dim)
      .def_rw("dense", &TableSpec::dense)
      .def_rw("optimizer", &TableSpec::optimizer)
      .def_rw("init", &TableSpec::init)
      .def_rw("seed", &TableSpec::seed)
      .def_rw("range_low", &TableSpec::range_low)
      .def_rw("range_high", &TableSpec::range_high);
  nb::class_<ServerAddress>(m, "ServerAddress")
      .def(
          "__init__",
          [](ServerAddress* self, uint32_t index, std::string host, uint16_t port, std::string unix_path) {
            new (self) ServerAddress{index, std::move(host), port, std::move(unix_path)};
          },
          nb::arg("index"), nb::arg("host"), nb::arg("port"), nb::arg("unix_path") = "")
      .def_ro("index", &ServerAddress::index)
      .def_ro("host", &ServerAddress::host)
      .def_ro("port", &ServerAddress::port)
      .def_ro("unix_path", &ServerAddress::unix_path);
  nb::class_<Placement>(m, "Placement")
      .def("__init__", &make_placement, nb::kw_only(), nb::arg("version"), nb::arg("weak"),
           nb::arg("servers"), nb::arg("terms"), nb::arg("chains"))
      .def_ro("version", &Placement::version);
}

using Coordinators = std::vector<std::pair<std::string, uint16_t>>;

PyClientPtr connect(uint64_t client_id, uint32_t incarnation, const nb::bytes& token,
                    const Placement& placement, const std::string& lane, double timeout_s,
                    size_t shm_bytes_max, bool any_copy, const Coordinators& coordinators) {
  RemoteOptions options;
  options.identity = {client_id, incarnation, to_bytes(token),
                      static_cast<uint32_t>(placement.shards.size())};
  options.placement = placement;
  if (any_copy) options.placement.any_copy = static_cast<uint32_t>(client_id);
  options.lane = parse_lane(lane);
  options.shm_bytes_max = shm_bytes_max;
  for (const auto& [host, port] : coordinators) options.coordinators.push_back({host, port});
  return std::make_shared<PyClient>(
      take(without_gil([&] { return connect_remote(std::move(options), deadline_in(timeout_s)); })));
}

nb::dict figures_dict(const TableFigures& f) {
  return counts({{"rows", f.rows},
                 {"value_bytes", f.value_bytes},
                 {"state_bytes", f.state_bytes},
                 {"memory_bytes", f.memory_bytes},
                 {"pushes", f.pushes},
                 {"pulls", f.pulls}});
}

nb::dict counters_dict(const ClientCounters& c) {
  nb::dict dict = counts({{"pulls", c.pulls},
                          {"pushes", c.pushes},
                          {"requests", c.requests},
                          {"retries", c.retries},
                          {"reconnects", c.reconnects},
                          {"bytes_sent", c.bytes_sent},
                          {"bytes_received", c.bytes_received},
                          {"shared_bytes", c.shared_bytes},
                          {"reads_behind", c.reads_behind},
                          {"versions_behind_max", c.versions_behind_max}});
  dict["lanes"] = c.lanes;
  dict["waits_s"] = c.waits_s;
  return dict;
}

nb::tuple scan(const PyClientPtr& self, uint32_t table, uint32_t shard, uint64_t cursor, size_t rows_max,
               double timeout_s) {
  StoreClient& client = self->use();
  if (shard >= client.shards()) {
    raise({Code::bad_input,
           "shard " + std::to_string(shard) + " is not below " + std::to_string(client.shards())});
  }
  const auto page = std::make_shared<ScanPage>(
      take(without_gil([&] { return client.scan(table, shard, cursor, rows_max, deadline_in(timeout_s)); })));
  const size_t count = page->keys.size();
  const size_t dim = count == 0 ? 0 : page->values.size() / count;
  const int64_t next = page->next ? static_cast<int64_t>(*page->next) : -1;
  const nb::capsule keep = capsule_of(page);
  return nb::make_tuple(
      nb::cast(nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>(page->keys.data(), {count}, keep)),
      nb::cast(nb::ndarray<nb::numpy, float, nb::ndim<2>>(page->values.data(), {count, dim}, keep)), next);
}

PushOptions push_options(const std::string& codec, uint64_t step, int64_t stage_rank, bool by_staleness) {
  return {.codec = codec_names.parse(codec),
          .step = step,
          .stage_rank = stage_rank,
          .by_staleness = by_staleness};
}

void bind_rows(nb::class_<PyClient>& c) {
  using namespace nb::literals;
  c.def(
      "pull",
      [](const PyClientPtr& self, uint32_t table, const Keys& keys, const std::string& codec,
         const std::optional<Out>& out,
         double timeout_s) { return pull_items(self, {pull_item(table, keys, out)}, codec, timeout_s); },
      "table"_a, "keys"_a, nb::kw_only(), "codec"_a = "fp32", "out"_a = nb::none(), "timeout_s"_a);
  c.def(
      "push",
      [](const PyClientPtr& self, uint32_t table, const Keys& keys, const Floats& grads, float lr,
         const std::string& codec, uint64_t step, int64_t stage_rank, bool by_staleness, double timeout_s) {
        return push_items(self, {push_item(table, keys, grads, lr)},
                          push_options(codec, step, stage_rank, by_staleness), timeout_s);
      },
      "table"_a, "keys"_a, "grads"_a, nb::kw_only(), "lr"_a, "codec"_a = "fp32", "step"_a = 0,
      "stage_rank"_a = -1, "by_staleness"_a = false, "timeout_s"_a);
  c.def(
      "assign",
      [](const PyClientPtr& self, uint32_t table, const Keys& keys, const Floats& values, double timeout_s) {
        return push_items(self, {push_item(table, keys, values, NAN)}, {.mode = PushMode::assign}, timeout_s);
      },
      "table"_a, "keys"_a, "values"_a, nb::kw_only(), "timeout_s"_a);
}

void bind_many(nb::class_<PyClient>& c) {
  using namespace nb::literals;
  using PullTuple = std::tuple<uint32_t, std::optional<Keys>, std::optional<Out>>;
  using PushTuple = std::tuple<uint32_t, std::optional<Keys>, Floats, float>;
  c.def(
      "pull_many",
      [](const PyClientPtr& self, const std::vector<PullTuple>& all, const std::string& codec,
         double timeout_s) {
        std::vector<PullItem> items;
        for (const auto& [table, keys, out] : all) items.push_back(pull_item(table, keys, out));
        return pull_items(self, std::move(items), codec, timeout_s);
      },
      "items"_a, nb::kw_only(), "codec"_a = "fp32", "timeout_s"_a);
  c.def(
      "push_many",
      [](const PyClientPtr& self, const std::vector<PushTuple>& all, uint64_t step, int64_t stage_rank,
         bool by_staleness, const std::string& codec, double timeout_s) {
        std::vector<PushItem> items;
        for (const auto& [table, keys, grads, lr] : all) items.push_back(push_item(table, keys, grads, lr));
        return push_items(self, std::move(items), push_options(codec, step, stage_rank, by_staleness),
                          timeout_s);
      },
      "items"_a, nb::kw_only(), "step"_a = 0, "stage_rank"_a = -1, "by_staleness"_a = false,
      "codec"_a = "fp32", "timeout_s"_a);
}

void bind_tensors(nb::class_<PyClient>& c) {
  using namespace nb::literals;
  c.def(
      "pull_tensor",
      [](const PyClientPtr& self, uint32_t tensor, const std::string& codec, const std::optional<Out>& out,
         double timeout_s) {
        return pull_items(self, {pull_item(tensor, std::nullopt, out)}, codec, timeout_s);
      },
      "tensor"_a, nb::kw_only(), "codec"_a = "fp32", "out"_a = nb::none(), "timeout_s"_a);
  c.def(
      "push_tensor",
      [](const PyClientPtr& self, uint32_t tensor, const Floats& grad, float lr, const std::string& codec,
         uint64_t step, int64_t stage_rank, bool by_staleness, const std::optional<Floats>& pulled,
         float dc_lambda, double timeout_s) {
        PushItem item = push_item(tensor, std::nullopt, grad, lr);
        if (pulled) item.pulled = {pulled->data(), pulled->size()};
        item.dc_lambda = dc_lambda;
        return push_items(self, {item}, push_options(codec, step, stage_rank, by_staleness), timeout_s);
      },
      "tensor"_a, "grad"_a, nb::kw_only(), "lr"_a, "codec"_a = "fp32", "step"_a = 0, "stage_rank"_a = -1,
      "by_staleness"_a = false, "pulled"_a = nb::none(), "dc_lambda"_a = 0.0f, "timeout_s"_a);
  for (const auto& [name, mode] :
       {std::pair{"init_tensor", PushMode::init_once}, std::pair{"assign_tensor", PushMode::assign}}) {
    c.def(
        name,
        [mode](const PyClientPtr& self, uint32_t tensor, const Floats& value, double timeout_s) {
          return push_items(self, {push_item(tensor, std::nullopt, value, NAN)}, {.mode = mode}, timeout_s);
        },
        "tensor"_a, "value"_a, nb::kw_only(), "timeout_s"_a);
  }
}

nb::tuple taken_over(const PyClientPtr& self, uint16_t shard, uint32_t term, uint64_t version,
                     uint64_t entry) {
  const Loss loss = self->use().taken_over(shard, {term, version, entry});
  return nb::make_tuple(loss.version, loss.pushes);
}

}  // namespace

nb::class_<PyClient> bind_store(nb::module_& m) {
  using namespace nb::literals;
  bind_specs(m);
  nb::class_<Ticket>(m, "Ticket")
      .def("done", [](const Ticket& self) { return self.operation->done(); })
      .def("wait", &wait_for, "timeout_s"_a)
      .def("leave", [](const Ticket& self) {
        StoreClient& c = self.client->use();
        without_gil([&] { c.leave(self.operation); });
      });
  nb::class_<PyClient> client(m, "Client");
  client.def_static(
      "embedded",
      [](uint32_t shards, size_t threads) {
        if (shards < 1 || shards > kShardsMax) {
          raise({Code::bad_input,
                 "shards " + std::to_string(shards) + " is not in 1.." + std::to_string(kShardsMax)});
        }
        return std::make_shared<PyClient>(make_embedded_client(shards, threads));
      },
      nb::kw_only(), "shards"_a = 64, "threads"_a = 0);
  client.def(
      "borrow_openmp",
      [](const PyClientPtr& self, const std::string& path) { return self->use().borrow_openmp(path); },
      "path"_a);
  client.def("fork",
             [](const PyClientPtr& self) { return std::make_shared<PyClient>(take(self->use().fork())); });
  client.def_static("connect", &connect, nb::kw_only(), "client_id"_a, "incarnation"_a, "token"_a,
                    "placement"_a, "lane"_a, "timeout_s"_a, "shm_bytes_max"_a, "any_copy"_a = false,
                    "coordinators"_a = Coordinators{});
  client.def("set_placement", [](const PyClientPtr& self, const Placement& placement) {
    StoreClient& c = self->use();
    without_gil([&] { c.set_placement(placement); });
  });
  client.def("taken_over", &taken_over, "shard"_a, "term"_a, "version"_a, "entry"_a);
  client.def(
      "declare",
      [](const PyClientPtr& self, const TableSpec& spec, double timeout_s) {
        StoreClient& c = self->use();
        check(without_gil([&] { return c.declare(spec, deadline_in(timeout_s)); }));
      },
      "spec"_a, "timeout_s"_a);
  bind_rows(client);
  bind_tensors(client);
  bind_many(client);
  bind_sync(client);
  client.def(
      "table_stats",
      [](const PyClientPtr& self, uint32_t table, double timeout_s) {
        StoreClient& c = self->use();
        return figures_dict(take(without_gil([&] { return c.figures(table, deadline_in(timeout_s)); })));
      },
      "table"_a, "timeout_s"_a);
  client.def("scan", &scan, "table"_a, "shard"_a, "cursor"_a, "rows_max"_a, "timeout_s"_a);
  client.def("counters", [](const PyClientPtr& self) {
    StoreClient& c = self->use();
    return counters_dict(without_gil([&] { return c.counters(); }));
  });
  client.def_prop_ro("shards", [](const PyClientPtr& self) { return self->use().shards(); });
  client.def("close", [](const PyClientPtr& self) {
    StoreClient& c = self->use();
    without_gil([&] { c.close(); });
  });
  return client;
}
