// Staged pushes and commits at one shard.
#include "store/staging.h"

#include <cmath>
#include <vector>

#include "check.h"
#include "store/shard.h"
#include "wire_talk.h"

using namespace shoal;

namespace {

constexpr uint32_t kTable = 1;

struct World {
  std::shared_ptr<StagedBudget> budget = std::make_shared<StagedBudget>();
  Shard shard{0, budget};
  uint64_t seq = 0;

  World() { CHECK(shard.declare(std::make_shared<TableSpec>(make_table(kTable, 1))).ok()); }

  Ack stage(uint64_t client, uint32_t rank, uint64_t step, std::vector<int64_t> keys,
            std::vector<float> grads, bool again = false) {
    const PushIdentity identity{.client = client, .incarnation = 1, .seq = again ? seq : ++seq, .low = 1};
    const PushPart part{
        .table = kTable, .term = 1, .lr = NAN, .keys = keys, .values = std::as_bytes(std::span(grads))};
    return shard.stage(&identity, {&part, 1}, rank, step);
  }
  Commit commit(uint64_t number, std::vector<CommitEntry> entries) const {
    for (CommitEntry& entry : entries) entry.incarnation = 1;
    return {.seq = number, .entries = std::move(entries)};
  }
  float value(int64_t key) {
    float out = 0.0f;
    CHECK(shard
              .pull({.table = kTable, .term = 1, .keys = {&key, 1}},
                    {.out = reinterpret_cast<std::byte*>(&out)})
              .status.ok());
    return out;
  }
};

CommitEntry entry(uint64_t client, uint32_t rank, uint64_t step, float weight) {
  return {.client = client, .step = step, .rank = rank, .weight = weight};
}

}  // namespace

TEST(a_commit_sums_in_order_steps_once_and_forgets) {
  World world;
  CHECK(world.stage(1, 0, 0, {5, 6}, {8, 8}).status.ok());
  CHECK(world.stage(2, 1, 0, {6, 7}, {4, 4}).status.ok());
  CHECK_EQ(world.value(6), 0.0f);
  CHECK(world.budget->used == 48);
  const Commit commit = world.commit(1, {entry(1, 0, 0, 0.25f), entry(2, 1, 0, 0.75f)});
  CHECK_EQ(world.shard.norm(commit), 4.0 + 25.0 + 9.0);
  CHECK_EQ(world.shard.commit(commit).version, 1);
  CHECK(world.value(5) == -2.0f && world.value(6) == -5.0f && world.value(7) == -3.0f);
  CHECK(world.budget->used == 0);
  CHECK(world.shard.commit(commit).duplicate);
  CHECK_EQ(world.shard.norm(commit), 38.0);  // a late asker gets the same figure
  CHECK_EQ(world.value(6), -5.0f);
}

TEST(a_staged_push_counts_once) {
  World world;
  CHECK(!world.stage(1, 0, 0, {5}, {2}).duplicate);
  CHECK(world.stage(1, 0, 0, {5}, {2}, true).duplicate);
  CHECK(world.shard.commit(world.commit(1, {entry(1, 0, 0, 1.0f)})).status.ok());
  CHECK(world.stage(1, 0, 0, {5}, {2}, true).duplicate);
  CHECK(world.budget->used == 0);
  CHECK_EQ(world.value(5), -2.0f);
}

TEST(only_the_client_that_finished_is_summed_and_what_was_dropped_leaves_nothing) {
  World world;
  CHECK(world.stage(1, 0, 3, {5}, {1000}).status.ok());  // an earlier life of rank 0
  CHECK(world.stage(2, 0, 3, {5}, {2}).status.ok());
  CHECK(world.stage(3, 1, 2, {5}, {1000}).status.ok());
  CHECK(world.stage(3, 1, 3, {5}, {4}).status.ok());
  CHECK(world.shard.commit(world.commit(1, {entry(2, 0, 3, 1.0f), entry(3, 1, 2, kDropped)})).status.ok());
  CHECK_EQ(world.value(5), -2.0f);
  CHECK(world.budget->used == 12);  // rank 1 goes on with step 3
}

TEST(commits_come_in_order) {
  World world;
  CHECK(world.shard.commit(world.commit(2, {})).status.code() == Code::refused);
  CHECK(world.shard.commit(world.commit(1, {})).status.ok());
  CHECK(world.shard.commit(world.commit(2, {})).status.ok());
  CHECK(std::isnan(world.shard.norm(world.commit(1, {}))));
}

TEST(the_scale_and_lr_of_a_commit_are_for_all_of_it) {
  World world;
  CHECK(world.stage(1, 0, 0, {5}, {8}).status.ok());
  Commit commit = world.commit(1, {entry(1, 0, 0, 1.0f)});
  commit.scale = 0.5f;
  commit.lr = 0.25f;
  CHECK(world.shard.commit(commit).status.ok());
  CHECK_EQ(world.value(5), -1.0f);
}

TEST(beyond_the_budget_a_push_is_refused_and_may_come_again) {
  World world;
  world.budget->bytes_max = 20;
  CHECK(world.stage(1, 0, 0, {5}, {2}).status.ok());
  const Ack refused = world.stage(1, 0, 1, {5}, {2});
  CHECK(refused.status.code() == Code::refused);
  CHECK(world.budget->used == 12);
  CHECK(world.shard.commit(world.commit(1, {entry(1, 0, 0, 1.0f)})).status.ok());
  CHECK(!world.stage(1, 0, 1, {5}, {2}, true).duplicate);
}
