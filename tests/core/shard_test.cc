// What a shard promises of a push as a whole; rows, pieces and records have suites of their own.
#include "store/shard.h"

#include <cmath>
#include <vector>

#include "check.h"
#include "wire_talk.h"

using namespace shoal;

namespace {

constexpr uint32_t kTable = 1;
constexpr uint32_t kTensor = 2;

struct World {
  Shard shard{0};
  std::vector<int64_t> keys{1, 2};
  std::vector<float> ones = std::vector<float>(2 * kPieceFloats, 1.0f);

  World() {
    CHECK(shard.declare(std::make_shared<TableSpec>(make_table(kTable, 4))).ok());
    CHECK(shard.declare(std::make_shared<TableSpec>(make_table(kTensor, 3 * kPieceFloats, true))).ok());
  }

  PushPart part(uint32_t table, PushMode mode) const {
    const size_t floats = table == kTable ? 8 : ones.size();
    return {.table = table,
            .term = 1,
            .mode = mode,
            .lr = NAN,
            .keys = keys,
            .values = std::as_bytes(std::span(ones).first(floats))};
  }

  float first_of(uint32_t table) {
    std::vector<float> out(2 * kPieceFloats);
    const PullTarget target{.out = reinterpret_cast<std::byte*>(out.data())};
    CHECK(shard.pull({.table = table, .term = 1, .keys = keys}, target).status.ok());
    return out[0];
  }
};

}  // namespace

TEST(parts_of_one_push_are_one_version) {
  World world;
  const std::vector<PushPart> parts{world.part(kTable, PushMode::update),
                                    world.part(kTensor, PushMode::update)};
  const PushIdentity identity{.client = 1, .incarnation = 1, .seq = 1, .low = 1};
  CHECK_EQ(world.shard.push(&identity, parts, 0).version, 1);
  CHECK_EQ(world.first_of(kTable), -1.0f);
  CHECK_EQ(world.first_of(kTensor), -1.0f);
  CHECK(world.shard.push(&identity, parts, 0).duplicate);
}

TEST(a_bad_part_leaves_the_others_undone) {
  World world;
  std::vector<PushPart> parts{world.part(kTable, PushMode::update), world.part(kTensor, PushMode::update)};
  parts[1].values = parts[1].values.first(8);
  CHECK(world.shard.push(nullptr, parts, 0).status.code() == Code::refused);
  CHECK_EQ(world.first_of(kTable), 0.0f);
}

// A piece may be made before anything is written to it: that must not count as its first value.
TEST(a_first_value_counts_until_something_was_written) {
  World world;
  const PushPart first = world.part(kTensor, PushMode::init_once);
  CHECK(world.shard.push(nullptr, {&first, 1}, 0).status.ok());
  CHECK_EQ(world.first_of(kTensor), 1.0f);
  const PushPart step = world.part(kTensor, PushMode::update);
  CHECK(world.shard.push(nullptr, {&step, 1}, 0).status.ok());
  CHECK(world.shard.push(nullptr, {&first, 1}, 0).status.ok());
  CHECK_EQ(world.first_of(kTensor), 0.0f);
}
