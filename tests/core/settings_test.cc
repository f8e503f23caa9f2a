// Hyper-parameters change while copies of a shard make each update with those of their head.
#include <cmath>
#include <vector>

#include "check.h"
#include "store/shard.h"
#include "wire_talk.h"

using namespace shoal;

namespace {

constexpr uint32_t kTable = 1;

std::shared_ptr<const TableSpec> spec(uint32_t generation, float momentum) {
  TableSpec spec = make_table(kTable, 1);
  spec.generation = generation;
  spec.optimizer.momentum = momentum;
  spec.optimizer.lr = 1.0f;
  return std::make_shared<const TableSpec>(spec);
}

// A head and its copy; what the one has applied is sent to the other at once.
struct World {
  Shard head{0};
  Shard copy{0};
  uint64_t seq = 0;
  size_t told = 0;  // updates that went with settings

  World() {
    head.place({.term = 1, .head = true, .reads = false});
    copy.place({.term = 1, .head = false, .reads = true});
  }
  void push() {
    const int64_t key = 5;
    const float grad = 1.0f;
    const PushPart part{.table = kTable,
                        .term = 1,
                        .lr = NAN,
                        .keys = {&key, 1},
                        .values = std::as_bytes(std::span(&grad, 1))};
    const PushIdentity identity{.client = 1, .incarnation = 1, .seq = ++seq, .low = 1};
    const Ack ack = head.push(&identity, {&part, 1}, 0);
    CHECK(ack.status.ok());
    told += ack.settings.empty() ? 0 : 1;
    CHECK(copy.push(&identity, {&part, 1}, 0, ack.entry, false, ack.settings).status.ok());
  }
  static std::vector<float> row(Shard& shard) {
    const Shard::ImageHead image = shard.begin_image();
    const Result<ImagePage> page = shard.read_image(image.id, 1 << 20);
    shard.end_image(image.id);
    return page->rows;
  }
  bool equal() { return row(head) == row(copy); }
};

}  // namespace

TEST(copies_that_heard_of_a_table_in_another_order_step_as_their_head_does) {
  for (const bool head_is_late : {false, true}) {
    World world;
    Shard& late = head_is_late ? world.head : world.copy;
    Shard& early = head_is_late ? world.copy : world.head;
    CHECK(late.declare(spec(1, 0.25f)).ok());
    CHECK(early.declare(spec(2, 0.75f)).ok());
    for (int i = 0; i < 3; ++i) world.push();
    CHECK(world.equal());
    CHECK_EQ(world.told, 1);
    CHECK(late.declare(spec(2, 0.75f)).ok());
    for (int i = 0; i < 3; ++i) world.push();
    CHECK(world.equal());
    CHECK_EQ(world.told, head_is_late ? 2 : 1);
  }
}

TEST(a_copy_goes_on_as_head_with_the_newest_settings_that_it_knows_of) {
  World world;
  for (Shard* shard : {&world.head, &world.copy}) CHECK(shard->declare(spec(1, 0.25f)).ok());
  CHECK(world.head.declare(spec(2, 0.75f)).ok());
  world.push();
  Shard third{0};
  CHECK(third.declare(spec(1, 0.25f)).ok());
  const Shard::ImageHead image = world.copy.begin_image();
  CHECK(third.restore(image.settings).ok());
  world.copy.end_image(image.id);
  third.place({.term = 2, .head = true, .reads = false});
  const int64_t key = 5;
  const float grad = 1.0f;
  const PushPart part{
      .table = kTable, .term = 2, .lr = NAN, .keys = {&key, 1}, .values = std::as_bytes(std::span(&grad, 1))};
  const Ack ack = third.push(nullptr, {&part, 1}, 0);
  CHECK(ack.status.ok());
  CHECK(ack.settings.size() == 1 && ack.settings[0]->generation == 2);
}

TEST(rows_are_born_with_the_settings_of_the_update_that_they_are_born_by) {
  Shard shard{0};
  TableSpec adagrad = make_table(kTable, 1);
  adagrad.optimizer.kind = OptimizerKind::adagrad;
  CHECK(shard.declare(std::make_shared<TableSpec>(adagrad)).ok());
  adagrad.generation += 1;
  adagrad.optimizer.initial = 99.0f;
  CHECK(shard.declare(std::make_shared<TableSpec>(adagrad)).ok());
  const int64_t key = 5;
  const float grad = 1.0f;
  const PushPart part{.table = kTable,
                      .term = 1,
                      .lr = 1.0f,
                      .keys = {&key, 1},
                      .values = std::as_bytes(std::span(&grad, 1))};
  CHECK(shard.push(nullptr, {&part, 1}, 0).status.ok());
  CHECK(std::abs(World::row(shard).at(0) + 0.1f) < 1e-5f);  // lr / sqrt(99 + 1)
}
