#include "store/store.h"

#include <unistd.h>

#include <fstream>

#include "check.h"
#include "wire_talk.h"

using namespace shoal;

namespace {

size_t rss_bytes() {
  size_t pages_mapped = 0;
  size_t pages_resident = 0;
  std::ifstream("/proc/self/statm") >> pages_mapped >> pages_resident;
  return pages_resident * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

TableSpec adagrad(uint32_t id, uint64_t dim) {
  TableSpec spec = make_table(id, dim);
  spec.optimizer.kind = OptimizerKind::adagrad;
  spec.optimizer.eps = 1e-10f;
  return spec;
}

void give_birth(Store& store, const TableSpec& spec, int64_t rows) {
  std::vector<std::vector<int64_t>> keys(store.shards());
  for (int64_t key = 0; key < rows; ++key) keys[shard_of_key(spec, key, store.shards())].push_back(key);
  for (uint32_t shard = 0; shard < store.shards(); ++shard) {
    const std::vector<float> grads(keys[shard].size() * spec.dim, 1.0f);
    const PushPart part{.table = spec.id,
                        .term = 1,
                        .lr = 0.1f,
                        .keys = keys[shard],
                        .values = std::as_bytes(std::span(grads))};
    CHECK(store.shard(shard).push(nullptr, {&part, 1}, 0).status.ok());
  }
}

}  // namespace

TEST(many_small_tables_are_small) {
  const size_t before = rss_bytes();
  Store store(64);
  size_t counted = 0;
  for (uint32_t id = 1; id <= 26; ++id) {
    const TableSpec spec = adagrad(id, 16);
    CHECK(store.declare(spec).ok());
    give_birth(store, spec, 1000);
    const Result<TableFigures> figures = store.figures(id);
    REQUIRE(figures.ok());
    CHECK_EQ(figures->rows, 1000);
    counted += figures->memory_bytes;
  }
  CHECK(counted < 16'000'000);
  CHECK(rss_bytes() < before + 64'000'000);
}

TEST(a_table_is_opened_again_with_new_settings_but_not_as_another) {
  Store store(4);
  TableSpec spec = adagrad(1, 16);
  CHECK(store.declare(spec).ok());
  spec.generation = 2;
  spec.optimizer.lr = 0.5f;
  CHECK(store.declare(spec).ok());
  spec.generation = 1;
  spec.optimizer.lr = 0.25f;
  CHECK(store.declare(spec).ok());  // of an older opening: nothing changes
  CHECK_EQ(store.table(1)->optimizer.lr, 0.5f);
  spec.generation = 3;
  spec.dim = 8;
  CHECK(store.declare(spec).code() == Code::mismatch);
  CHECK_EQ(store.table(1)->dim, 16);
}
