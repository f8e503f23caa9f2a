// An image is the shard as it was when the image began, whatever is pushed while it is read; and a shard made
// from it goes on as the first one would have.
#include "store/image.h"

#include <map>
#include <random>
#include <vector>

#include "check.h"
#include "store/shard.h"
#include "wire_talk.h"

using namespace shoal;

namespace {

constexpr uint32_t kTable = 1;
constexpr uint32_t kTensor = 2;
constexpr uint32_t kDim = 4;

struct World {
  Shard shard{0};
  std::mt19937 random{7};
  uint64_t seq = 0;

  World() {
    for (const auto& [id, dim] : {std::pair{kTable, kDim}, {kTensor, 3 * kPieceFloats}}) {
      TableSpec spec = make_table(id, dim, id == kTensor);
      spec.optimizer.kind = OptimizerKind::adagrad;
      spec.optimizer.lr_decay = 0.01f;  // a scalar in the state
      CHECK(shard.declare(std::make_shared<TableSpec>(spec)).ok());
    }
  }

  Ack push(uint32_t table, std::vector<int64_t> keys, uint64_t number, bool staged = false) {
    const std::vector<float> grads(table == kTable ? keys.size() * kDim : keys.size() * kPieceFloats, 0.5f);
    const PushPart part{
        .table = table, .term = 1, .lr = 0.1f, .keys = keys, .values = std::as_bytes(std::span(grads))};
    const PushIdentity identity{.client = 1, .incarnation = 1, .seq = number, .low = 1};
    return staged ? shard.stage(&identity, {&part, 1}, 0, 0) : shard.push(&identity, {&part, 1}, number);
  }
  void push_some() {
    std::vector<int64_t> keys(random() % 20 + 1);
    for (int64_t& key : keys) key = static_cast<int64_t>(random() % 2000);
    std::sort(keys.begin(), keys.end());
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    push(kTable, keys, ++seq);
    if (random() % 8 == 0) push(kTensor, {static_cast<int64_t>(random() % 3)}, ++seq);
  }
};

using Rows = std::map<std::pair<uint32_t, int64_t>, std::vector<float>>;  // with the meta as floats behind

void add(Rows& rows, const ImagePage& page) {
  const size_t floats = page.rows.size() / page.keys.size();
  for (size_t i = 0; i < page.keys.size(); ++i) {
    const float* from = page.rows.data() + i * floats;
    std::vector<float>& row = rows[{page.table, page.keys[i]}];
    CHECK(row.empty());  // each comes once
    row.assign(from, from + floats);
    row.push_back(static_cast<float>(page.metas[i].version));
    row.push_back(static_cast<float>(page.metas[i].frequency));
    row.push_back(static_cast<float>(page.metas[i].last_step));
  }
}

Rows read(Shard& shard, uint64_t id, const std::function<void(const ImagePage&)>& between) {
  Rows rows;
  for (;;) {
    const Result<ImagePage> page = shard.read_image(id, 256);
    CHECK(page.ok());
    if (page->keys.empty()) return rows;
    add(rows, *page);
    between(*page);
  }
}

}  // namespace

TEST(an_image_is_of_the_moment_it_began) {
  World world;
  for (int i = 0; i < 200; ++i) world.push_some();
  const uint64_t first = world.shard.begin_image().id;
  const Rows before = read(world.shard, first, [](const ImagePage&) {});
  CHECK(before.size() > 1000);
  const uint64_t second = world.shard.begin_image().id;
  CHECK(world.shard.read_image(first, 256).status().code() == Code::unavailable);  // it is over
  world.shard.end_image(first);
  CHECK(read(world.shard, second, [&](const ImagePage&) { world.push_some(); }) == before);
  CHECK(read(world.shard, world.shard.begin_image().id, [](const ImagePage&) {}) != before);
}

TEST(a_shard_made_from_an_image_goes_on_as_the_first) {
  World world;
  for (int i = 0; i < 50; ++i) world.push_some();
  const uint64_t last = world.seq;
  CHECK(world.push(kTable, {1, 2}, ++world.seq, true).status.ok());  // staged
  World other;
  const Shard::ImageHead image = world.shard.begin_image();
  other.push(kTable, {2500}, 1);  // what was there before goes
  other.shard.clear();
  CHECK(other.shard.restore(image.bytes).ok());
  const Rows rows =
      read(world.shard, image.id, [&](const ImagePage& page) { CHECK(other.shard.restore(page).ok()); });
  CHECK(other.push(kTable, {1}, last).duplicate);
  const Commit commit{.seq = 1, .entries = {{.client = 1, .incarnation = 1, .weight = 1.0f}}};
  for (World* each : {&world, &other}) {
    CHECK(each->shard.commit(commit).status.ok());
    each->push(kTensor, {0, 1}, last + 2);
  }
  const Rows after = read(other.shard, other.shard.begin_image().id, [](const ImagePage&) {});
  CHECK(after == read(world.shard, world.shard.begin_image().id, [](const ImagePage&) {}));
  CHECK(after != rows);
}

TEST(what_is_no_image_is_refused) {
  World world;
  CHECK(world.shard.restore(std::vector<std::byte>(7)).code() == Code::refused);
  CHECK(world.shard.restore(ImagePage{.table = 9}).code() == Code::unknown_table);
  CHECK(world.shard.restore(ImagePage{.table = kTable, .keys = {1}, .metas = {{}}, .rows = {1.0f}}).code() ==
        Code::refused);
  CHECK(world.shard.restore(ImagePage{.table = kTensor, .keys = {3}, .metas = {{}}, .rows = {1.0f}}).code() ==
        Code::refused);
}
