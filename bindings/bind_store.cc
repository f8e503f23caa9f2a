// Client, Ticket and the settings of tables. Convert, release the GIL, call, convert.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <memory>
#include <string>
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
  for (const Lane lane : {Lane::shm, Lane::unix_socket, Lane::tcp}) {
    if (name == lane_name(lane)) return lane;
  }
  raise({Code::bad_input, "lane '" + name + "' is not one of auto, shm, unix, tcp"});
}

// One operation in flight. The client lives at least as long.
struct Ticket {
  std::shared_ptr<PyClient> client;
  StoreClient::OperationPtr operation;
  bool flat = false;  // a tensor: one dimension
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

// Runs `call` without the GIL and makes a ticket of what it gives. `out` is the caller's array or None:
// rows may still be written to it after the ticket is dropped, so the operation keeps it.
template <typename Call>
Ticket start(const PyClientPtr& self, bool flat, nb::object out, Call call) {
  StoreClient& client = self->use();
  const std::shared_ptr<void> kept = out.is_none() ? nullptr : keep_object(std::move(out));
  return {self, take(without_gil([&] { return call(client, kept); })), flat};
}

std::span<float> out_span(const std::optional<Out>& out) {
  return out ? std::span<float>(out->data(), out->size()) : std::span<float>();
}

// Keeps `object` for as long as an array that is a view of it lives.
template <typename T>
nb::capsule capsule_of(T object) {
  auto owner = std::make_unique<T>(std::move(object));
  nb::capsule keep(owner.get(), [](void* p) noexcept { std::default_delete<T>()(static_cast<T*>(p)); });
  [[maybe_unused]] T* owned = owner.release();
  return keep;
}

nb::object rows_of(const Ticket& ticket) {
  const auto& operation = ticket.operation;
  if (operation->block == nullptr) return nb::none();  // a push, or the caller's own memory
  const std::array<size_t, 2> shape{operation->rows, operation->row_floats};
  const size_t flat = ticket.flat ? 1 : 0;
  return nb::cast(
      nb::ndarray<nb::numpy, float>(operation->out, 2 - flat, shape.data() + flat, capsule_of(operation)));
}

nb::object wait_for(Ticket& ticket, double timeout_s) {
  StoreClient& client = ticket.client->use();
  check(wait_in_slices(client, ticket.operation, deadline_in(timeout_s)));
  return rows_of(ticket);
}

void check_count(const char* verb, size_t keys) {
  if (keys > 0xffffffffu) {
    raise({Code::bad_input,
           std::string("a ") + verb + " of " + std::to_string(keys) + " keys; at most 2**32 - 1 at once"});
  }
}

Ticket push_rows(const PyClientPtr& self, uint32_t table, const Keys& keys, const Floats& values,
                 const PushOptions& options, double timeout_s) {
  check_count("push", keys.size());
  if (keys.size() > 0 && (values.ndim() != 2 || values.shape(0) != keys.size())) {
    raise({Code::bad_input, std::to_string(keys.size()) + " keys need as many rows of values"});
  }
  return start(self, false, nb::none(), [&](StoreClient& client, const std::shared_ptr<void>&) {
    return client.push(table, {keys.data(), keys.size()}, values.data(), options, deadline_in(timeout_s));
  });
}

Ticket push_dense(const PyClientPtr& self, uint32_t tensor, const Floats& values, const PushOptions& options,
                  double timeout_s) {
  return start(self, false, nb::none(), [&](StoreClient& client, const std::shared_ptr<void>&) {
    return client.push_tensor(tensor, {values.data(), values.size()}, options, deadline_in(timeout_s));
  });
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
}

PyClientPtr connect(uint64_t client_id, uint32_t incarnation, const nb::bytes& token,
                    std::vector<ServerAddress> servers, std::vector<uint32_t> placement,
                    std::vector<uint32_t> terms, const std::string& lane, double timeout_s,
                    size_t shm_bytes_max) {
  RemoteOptions options;
  options.identity = {client_id, incarnation, to_bytes(token), static_cast<uint32_t>(placement.size())};
  options.servers = std::move(servers);
  options.placement = std::move(placement);
  options.terms = std::move(terms);
  options.lane = parse_lane(lane);
  options.shm_bytes_max = shm_bytes_max;
  bool sound = !options.servers.empty() && !options.placement.empty() &&
               options.placement.size() <= kShardsMax && options.terms.size() == options.placement.size();
  for (const uint32_t server : options.placement) sound = sound && server < options.servers.size();
  if (!sound) {
    raise({Code::bad_input, "the placement names a server that is not in the list, or none at all"});
  }
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
                          {"shared_bytes", c.shared_bytes}});
  dict["lanes"] = c.lanes;
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

void bind_rows(nb::class_<PyClient>& c) {
  using namespace nb::literals;
  c.def(
      "pull",
      [](const PyClientPtr& self, uint32_t table, const Keys& keys, const std::string& codec,
         std::optional<Out> out, double timeout_s) {
        const Codec wire = codec_names.parse(codec);
        const std::span<float> to = out_span(out);
        check_count("pull", keys.size());
        return start(self, false, out ? nb::cast(*out) : nb::none(),
                     [&](StoreClient& client, const std::shared_ptr<void>& kept) {
                       return client.pull(table, {keys.data(), keys.size()}, wire, {to, kept},
                                          deadline_in(timeout_s));
                     });
      },
      "table"_a, "keys"_a, nb::kw_only(), "codec"_a = "fp32", "out"_a = nb::none(), "timeout_s"_a);
  c.def(
      "push",
      [](const PyClientPtr& self, uint32_t table, const Keys& keys, const Floats& grads, float lr,
         const std::string& codec, uint64_t step, int64_t stage_rank, double timeout_s) {
        const PushOptions options{
            .lr = lr, .codec = codec_names.parse(codec), .step = step, .stage_rank = stage_rank};
        return push_rows(self, table, keys, grads, options, timeout_s);
      },
      "table"_a, "keys"_a, "grads"_a, nb::kw_only(), "lr"_a, "codec"_a = "fp32", "step"_a = 0,
      "stage_rank"_a = -1, "timeout_s"_a);
  c.def(
      "assign",
      [](const PyClientPtr& self, uint32_t table, const Keys& keys, const Floats& values, double timeout_s) {
        return push_rows(self, table, keys, values, {.lr = NAN, .mode = PushMode::assign}, timeout_s);
      },
      "table"_a, "keys"_a, "values"_a, nb::kw_only(), "timeout_s"_a);
}

void bind_tensors(nb::class_<PyClient>& c) {
  using namespace nb::literals;
  c.def(
      "pull_tensor",
      [](const PyClientPtr& self, uint32_t tensor, const std::string& codec, std::optional<Out> out,
         double timeout_s) {
        const Codec wire = codec_names.parse(codec);
        const std::span<float> to = out_span(out);
        return start(self, true, out ? nb::cast(*out) : nb::none(),
                     [&](StoreClient& client, const std::shared_ptr<void>& kept) {
                       return client.pull_tensor(tensor, wire, {to, kept}, deadline_in(timeout_s));
                     });
      },
      "tensor"_a, nb::kw_only(), "codec"_a = "fp32", "out"_a = nb::none(), "timeout_s"_a);
  c.def(
      "push_tensor",
      [](const PyClientPtr& self, uint32_t tensor, const Floats& grad, float lr, const std::string& codec,
         uint64_t step, int64_t stage_rank, double timeout_s) {
        const PushOptions options{
            .lr = lr, .codec = codec_names.parse(codec), .step = step, .stage_rank = stage_rank};
        return push_dense(self, tensor, grad, options, timeout_s);
      },
      "tensor"_a, "grad"_a, nb::kw_only(), "lr"_a, "codec"_a = "fp32", "step"_a = 0, "stage_rank"_a = -1,
      "timeout_s"_a);
  for (const auto& [name, mode] :
       {std::pair{"init_tensor", PushMode::init_once}, std::pair{"assign_tensor", PushMode::assign}}) {
    c.def(
        name,
        [mode](const PyClientPtr& self, uint32_t tensor, const Floats& value, double timeout_s) {
          return push_dense(self, tensor, value, {.lr = NAN, .mode = mode}, timeout_s);
        },
        "tensor"_a, "value"_a, nb::kw_only(), "timeout_s"_a);
  }
}

}  // namespace

void bind_store(nb::module_& m) {
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
  client.def("fork",
             [](const PyClientPtr& self) { return std::make_shared<PyClient>(take(self->use().fork())); });
  client.def_static("connect", &connect, nb::kw_only(), "client_id"_a, "incarnation"_a, "token"_a,
                    "servers"_a, "placement"_a, "terms"_a, "lane"_a, "timeout_s"_a, "shm_bytes_max"_a);
  client.def(
      "declare",
      [](const PyClientPtr& self, const TableSpec& spec, double timeout_s) {
        StoreClient& c = self->use();
        check(without_gil([&] { return c.declare(spec, deadline_in(timeout_s)); }));
      },
      "spec"_a, "timeout_s"_a);
  bind_rows(client);
  bind_tensors(client);
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
}
