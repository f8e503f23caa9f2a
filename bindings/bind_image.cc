// A store of this process as bytes: images of its shards, read page by page, and restored.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include "py_client.h"
#include "py_server.h"
#include "serve/sync_desk.h"

namespace nb = nanobind;
using namespace shoal;

namespace {

using Keys = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Metas = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

Shard& shard_of(const LocalStore& self, uint32_t shard) {
  if (shard < self.store->shards()) return self.store->shard(shard);
  raise({Code::bad_input,
         "shard " + std::to_string(shard) + " is not below " + std::to_string(self.store->shards())});
}

nb::bytes to_python(const std::vector<std::byte>& bytes) {
  return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

std::span<const std::byte> view(const nb::bytes& bytes) {
  return {reinterpret_cast<const std::byte*>(bytes.c_str()), bytes.size()};
}

// (table, keys, metas, rows), or None at the end.
nb::object read_image(const LocalStore& self, uint32_t number, uint64_t id, size_t bytes_max) {
  Shard& shard = shard_of(self, number);
  auto page = std::make_shared<ImagePage>(take(without_gil([&] { return shard.read_image(id, bytes_max); })));
  const size_t count = page->keys.size();
  if (count == 0) return nb::none();
  const nb::capsule keep = capsule_of(page);
  auto* metas = reinterpret_cast<uint8_t*>(page->metas.data());
  return nb::make_tuple(
      page->table, nb::cast(nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>(page->keys.data(), {count}, keep)),
      nb::cast(nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>>(metas, {count, sizeof(RowMeta)}, keep)),
      nb::cast(nb::ndarray<nb::numpy, float, nb::ndim<2>>(page->rows.data(),
                                                          {count, page->rows.size() / count}, keep)));
}

void restore_page(const LocalStore& self, uint32_t number, uint32_t table, const Keys& keys,
                  const Metas& metas, const Rows& rows) {
  if (metas.shape(0) != keys.size() || metas.shape(1) != sizeof(RowMeta) || rows.shape(0) != keys.size())
    raise({Code::refused, "keys, metas and rows of a page do not fit together"});
  Shard& shard = shard_of(self, number);
  check(without_gil([&] {
    ImagePage page{.table = table, .keys = {keys.data(), keys.data() + keys.size()}};
    page.metas.resize(keys.size());
    std::memcpy(page.metas.data(), metas.data(), metas.size());
    page.rows.assign(rows.data(), rows.data() + rows.size());
    for (const int64_t key : page.keys)
      if (const auto spec = self.store->table(table);
          spec != nullptr && shard_of_key(*spec, key, self.store->shards()) != number)
        return Status{Code::refused, "key " + std::to_string(key) + " is of another shard"};
    return shard.restore(page);
  }));
}

void bind_local_store(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<LocalStore>(m, "Store")
      .def_prop_ro("shards", [](const LocalStore& self) { return self.store->shards(); })
      .def("load",
           [](const LocalStore& self, uint32_t shard) {
             const ShardLoad load = without_gil([&] { return shard_of(self, shard).load(); });
             return nb::make_tuple(load.bytes, load.floats);
           })
      .def("begin_image",
           [](const LocalStore& self, uint32_t shard) {
             const auto head = without_gil([&] { return shard_of(self, shard).begin_image(); });
             return nb::make_tuple(head.id, to_python(head.bytes));
           })
      .def("read_image", &read_image, "shard"_a, "image"_a, "bytes_max"_a)
      .def("end_image",
           [](const LocalStore& self, uint32_t shard, uint64_t id) { shard_of(self, shard).end_image(id); })
      .def("restore_head",
           [](const LocalStore& self, uint32_t shard, const nb::bytes& head) {
             check(without_gil([&] { return shard_of(self, shard).restore(view(head)); }));
             if (self.chain != nullptr) self.chain->restored(static_cast<uint16_t>(shard));
           })
      .def("declare", [](const LocalStore& self, const TableSpec& spec) { check(self.store->declare(spec)); })
      .def("unplace", [](const LocalStore& self, uint32_t shard) { shard_of(self, shard).unplace(); })
      .def("rejoin", [](const LocalStore& self, uint32_t shard) { shard_of(self, shard).rejoin(); })
      .def("began",
           [](const LocalStore& self, uint32_t shard) {
             const Shard::Began began = shard_of(self, shard).began();
             return nb::make_tuple(began.term, began.version, began.entry);
           })
      .def("clear", [](const LocalStore& self, uint32_t shard) { shard_of(self, shard).clear(); })
      .def("skip_commits", [](const LocalStore& self, uint32_t shard,
                              uint64_t seq) { shard_of(self, shard).skip_commits(seq); })
      .def("drop_unfinished",
           [](const LocalStore& self, uint32_t shard, const std::vector<uint64_t>& clocks) {
             shard_of(self, shard).drop_unfinished(clocks);
           })
      .def("sync_image",
           [](const LocalStore& self) {
             const auto image = without_gil([&] { return self.sync->image(); });
             return nb::make_tuple(to_python(image.bytes), image.clocks);
           })
      .def("restore_sync",
           [](const LocalStore& self, const nb::bytes& image) {
             if (!without_gil([&] { return self.sync->decode(view(image)); }))
               raise({Code::refused,
                      "these bytes are no sync shard, or workers wait for the one that is here"});
             if (self.chain != nullptr) self.chain->restored(kSyncLog);
           })
      .def("restore_page", &restore_page, "shard"_a, "table"_a, "keys"_a, "metas"_a, "rows"_a);
}

}  // namespace

void bind_image(nb::module_& m, nb::class_<PyClient>& client, nb::class_<PyServer>& server) {
  using namespace nb::literals;
  bind_local_store(m);
  client.def(
      "store",
      [](const PyClientPtr& self) {
        const LocalStore local = self->use().local();
        if (local.store == nullptr) raise({Code::bad_input, "the rows of this client lie at servers"});
        return local;
      },
      nb::keep_alive<0, 1>());
  client.def(
      "hold",
      [](const PyClientPtr& self, double timeout_s) {
        StoreClient& c = self->use();
        return without_gil([&] { return c.hold(deadline_in(timeout_s)); });
      },
      "timeout_s"_a);
  client.def("release", [](const PyClientPtr& self) { self->use().release(); });
  server.def(
      "store",
      [](PyServer& self) {
        ServerState& state = self.server->state();
        return LocalStore{&state.store, &state.sync, &state.chain};
      },
      nb::keep_alive<0, 1>());
}
