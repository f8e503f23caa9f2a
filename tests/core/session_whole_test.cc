// What a server takes or refuses, it takes or refuses wholly: a push on all shards, a fence on all servers.
#include "check.h"
#include "session_talk.h"

using namespace shoal;
using namespace shoal::session_talk;

TEST(a_push_whose_second_part_is_bad_applies_none) {
  Server server;
  Talk talk(server.state);
  CHECK(talk.greet(kToken));
  CHECK(declare(talk, make_table(1, 4)) == Code::ok);
  std::vector<Part> parts{part_of(1, 2), part_of(1, 2)};
  parts[0].values_at = parts[1].values_at = 4;
  parts[1].lr = -1.0f;
  CHECK(talk.ask(Kind::push, parts, keys_and_rows(2, 16), 1, 1).code() == Code::refused);
  CHECK_EQ(rows_of(talk, 1), 0);
}

// Each of these is good on shard 0 and bad on shard 1.
TEST(a_push_that_is_bad_on_one_shard_is_applied_on_none) {
  Server server;
  Talk talk(server.state);
  CHECK(talk.greet(kToken));
  CHECK(declare(talk, make_table(1, 4)) == Code::ok);
  CHECK(declare(talk, make_table(2, 100, true)) == Code::ok);
  const auto push = [&talk](auto change, uint32_t flags = 0, uint64_t seq = 1) {
    std::vector<Part> parts{part_of(1, 2), part_of(1, 2, 1)};
    parts[0].values_at = parts[1].values_at = 4;
    change(parts[1]);
    return talk.ask(Kind::push, parts, keys_and_rows(2, 16), seq, 1, flags).code();
  };
  CHECK(push([](Part& part) { part.lr = -1.0f; }) == Code::refused);
  CHECK(push([](Part& part) { part.mode = 2; }) == Code::refused);
  CHECK(push([](Part& part) {
          part.mode = 1;
          part.codec = 1;
        }) == Code::refused);
  CHECK(push([](Part& part) { part.dc_lambda = 0.5f; }) == Code::refused);
  CHECK(push([](Part& part) { part.mode = 1; }, kStage) == Code::refused);
  CHECK(push([](Part& part) {
          part.table = 2;
          part.count = 1;
          part.values_words = 3;
        }) == Code::refused);
  CHECK_EQ(rows_of(talk, 1), 0);
  Part alone = part_of(1, 2);
  alone.values_at = 4;
  CHECK(talk.ask(Kind::push, {&alone, 1}, keys_and_rows(2, 16), 300, 300).code() == Code::ok);
  CHECK(push([](Part&) {}, 0, 400) == Code::refused);  // shard 0 has a window around it
  CHECK_EQ(server.state.store.shard(0).reached(2).status.ok(), false);
  CHECK(push([](Part& part) { part.lr = 1.0f; }) == Code::ok);
  CHECK(talk.open());
}

// The second group of a shard would be taken for a duplicate of the first, and lost.
TEST(a_push_that_comes_back_to_a_shard_is_refused) {
  Server server;
  Talk talk(server.state);
  CHECK(talk.greet(kToken));
  CHECK(declare(talk, make_table(1, 4)) == Code::ok);
  std::vector<Part> parts{part_of(1, 2, 0), part_of(1, 2, 1), part_of(1, 2, 0)};
  for (Part& part : parts) {
    part.values_at = 4;
  }
  CHECK(talk.ask(Kind::push, parts, keys_and_rows(2, 16), 1, 1).code() == Code::refused);
  CHECK_EQ(rows_of(talk, 1), 0);
}

// Who fenced it has left in good order, and a server that never saw either gets the shards.
TEST(a_fence_outlives_its_goodbye_and_moves_with_the_shard) {
  Server first;
  Server second;
  Talk older(first.state);
  CHECK(older.greet(kToken));
  Talk newer(first.state);
  newer.incarnation = 2;
  CHECK(newer.greet(kToken));
  newer.ask(Kind::goodbye);
  Talk again(first.state);
  CHECK(again.prove(bytes_of(kToken), again.hello()).code() == Code::fenced);
  CHECK(second.state.store.shard(3).restore(first.state.store.shard(3).begin_image().bytes).ok());
  Talk elsewhere(second.state);
  CHECK(elsewhere.prove(bytes_of(kToken), elsewhere.hello()).code() == Code::fenced);
}
