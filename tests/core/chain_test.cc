#include "serve/chain.h"

#include "check.h"

using namespace shoal;

namespace {

Part entry_of(uint16_t shard, uint64_t entry) {
  Part part;
  part.shard = shard;
  set_log_entry(part, entry);
  return part;
}

// A chain, and the servers behind it as the test plays them.
struct World {
  int woken = 0;
  Chain chain{[this] { ++woken; }, false};

  World() { chain.introduce(3, 1, 4); }

  void place(uint16_t shard, uint32_t term, uint32_t next) {
    chain.place(shard, {.term = term, .head = true, .reads = false, .next = next});
  }
  void send(const std::vector<Part>& parts) {
    std::vector<Chain::Entry> entries;
    for (const Part& part : parts)
      entries.push_back({{part}, std::make_shared<const std::vector<std::byte>>(8)});
    chain.send(Header{}, std::move(entries));
  }
  std::shared_ptr<int> when_held(const std::vector<Part>& parts) {
    auto times = std::make_shared<int>(0);
    chain.when_held(parts, [times](const auto& lost) { *times += lost.empty() ? 1 : 100; });
    return times;
  }
  void answer(uint32_t server, const Request& request, Code code = Code::ok, std::vector<Part> had = {}) {
    Header header;
    header.request = request.header.request;
    header.code = static_cast<uint16_t>(code);
    chain.on_reply(server, {header, had, {}});
  }
};

}  // namespace

TEST(a_reply_waits_until_every_shard_is_held) {
  World world;
  world.place(5, 1, 0);
  world.place(6, 1, 1);
  world.send({entry_of(5, 1), entry_of(6, 1)});
  const auto done = world.when_held({entry_of(5, 1), entry_of(6, 1)});
  const auto first = world.chain.next_to_send(0);
  const auto second = world.chain.next_to_send(1);
  REQUIRE(first != nullptr && second != nullptr);
  CHECK(first->parts.size() == 1 && first->parts[0].shard == 5);
  world.answer(0, *first);
  CHECK(*done == 0);
  world.answer(1, *second);
  CHECK(*done == 1);
  CHECK(*world.when_held({entry_of(5, 1)}) == 1);  // held already
  world.answer(1, *second);                        // again
  CHECK(*done == 1);
}

TEST(a_later_entry_holds_the_earlier_ones) {
  World world;
  world.place(5, 1, 0);
  world.send({entry_of(5, 1)});
  world.send({entry_of(5, 2)});
  const auto done = world.when_held({entry_of(5, 1)});
  const auto first = world.chain.next_to_send(0);
  const auto second = world.chain.next_to_send(0);
  world.answer(0, *second);
  CHECK(*done == 1);
}

TEST(what_is_not_answered_is_sent_again_after_a_lost_connection) {
  World world;
  world.place(5, 1, 0);
  world.send({entry_of(5, 1)});
  REQUIRE(world.chain.next_to_send(0) != nullptr);
  CHECK(world.chain.next_to_send(0) == nullptr);
  world.chain.lost(0);
  CHECK(world.chain.has_open(0));
  CHECK(world.chain.next_to_send(0) != nullptr);
}

TEST(a_new_placement_sends_what_is_kept_to_the_new_next_under_its_term) {
  World world;
  world.place(5, 1, 0);
  world.send({entry_of(5, 1)});
  world.send({entry_of(5, 2)});
  const auto done = world.when_held({entry_of(5, 2)});
  world.answer(0, *world.chain.next_to_send(0));  // the first; then server 0 dies
  world.place(5, 2, 1);
  const auto again = world.chain.next_to_send(1);
  REQUIRE(again != nullptr);
  CHECK(log_entry(again->parts[0]) == 2 && again->parts[0].term == 2);
  CHECK(world.chain.next_to_send(1) == nullptr);
  world.place(5, 1, 0);  // an older one comes late
  CHECK(*done == 0);
  world.answer(1, *again);
  CHECK(*done == 1);
}

TEST(without_a_server_behind_nothing_is_waited_for) {
  World world;
  world.place(5, 1, 0);
  world.send({entry_of(5, 1)});
  const auto done = world.when_held({entry_of(5, 1)});
  world.place(5, 2, kNobody);
  CHECK(*done == 1);
  world.send({entry_of(5, 2)});
  CHECK(*world.when_held({entry_of(5, 2)}) == 1);
}

TEST(who_leaves_a_chain_answers_for_nothing_that_was_not_held) {
  World world;
  world.place(5, 1, 0);
  world.send({entry_of(5, 1)});
  const auto done = world.when_held({entry_of(5, 1)});
  world.chain.place(5, {.term = 2, .head = false, .reads = false, .next = kNobody, .member = false});
  CHECK(*done == 100);
  CHECK(*world.when_held({entry_of(5, 2)}) == 100);
  Part filled = entry_of(5, 3);
  filled.term = 2;
  CHECK(*world.when_held({filled}) == 1);  // it was sent here to be filled
}

TEST(of_a_frame_that_was_refused_in_part_the_rest_is_held) {
  World world;
  world.place(5, 1, 0);
  world.place(6, 1, 0);
  world.send({entry_of(5, 1), entry_of(6, 1)});
  const auto five = world.when_held({entry_of(5, 1)});
  const auto six = world.when_held({entry_of(6, 1)});
  world.answer(0, *world.chain.next_to_send(0), Code::moved, {entry_of(5, 1)});
  CHECK(*five == 1 && *six == 0);
  world.place(6, 2, 0);  // what was refused goes with the placement that the other had learnt
  const auto again = world.chain.next_to_send(0);
  REQUIRE(again != nullptr && again->parts.size() == 1);
  CHECK(again->parts[0].shard == 6 && again->parts[0].term == 2);
  world.answer(0, *again);
  CHECK(*six == 1);
}

TEST(entries_behind_an_image_wait_for_its_end_and_are_then_waited_for) {
  World world;
  world.place(5, 2, kNobody);
  const auto fill = world.chain.begin_fill(5, 1, 2);
  world.send({entry_of(5, 7)});  // in the image
  world.send({entry_of(5, 8)});  // behind it
  CHECK(*world.when_held({entry_of(5, 8)}) == 1);
  CHECK(world.chain.next_to_send(1) == nullptr);
  world.chain.image_sent(fill, 7);
  const auto after = world.chain.next_to_send(1);
  const auto end = world.chain.next_to_send(1);
  REQUIRE(after != nullptr && end != nullptr);
  CHECK(log_entry(after->parts[0]) == 8);
  CHECK(end->parts[0].mode == 1 && log_entry(end->parts[0]) == 8);
  world.send({entry_of(5, 9)});
  const auto done = world.when_held({entry_of(5, 9)});
  CHECK(*done == 0 && !fill->done);
  world.answer(1, *after);
  world.answer(1, *end);
  CHECK(fill->done && *done == 0);
  CHECK(*world.when_held({entry_of(5, 7)}) == 1);  // the image has it
  world.answer(1, *world.chain.next_to_send(1));
  CHECK(*done == 1);
}

TEST(a_fill_fails_when_a_frame_of_it_is_refused_or_the_shard_is_placed_anew) {
  World world;
  world.place(5, 2, kNobody);
  const auto refused = world.chain.begin_fill(5, 1, 2);
  world.chain.send_image(refused, Header{}, {entry_of(5, 0)},
                         std::make_shared<const std::vector<std::byte>>(8));
  CHECK(world.chain.state(refused).failed.ok() && world.chain.state(refused).open == 1);
  world.answer(1, *world.chain.next_to_send(1), Code::unknown_table);
  CHECK(world.chain.state(refused).failed.code() == Code::unknown_table);
  const auto other = world.chain.begin_fill(5, 2, 2);
  world.place(5, 3, kNobody);
  CHECK(world.chain.state(other).failed.code() == Code::moved);
  world.chain.image_sent(other, 9);  // too late: nothing is sent
  CHECK(world.chain.next_to_send(2) == nullptr);
}

TEST(a_fill_is_of_the_term_it_was_ordered_for_and_can_be_given_up) {
  World world;
  world.place(5, 2, kNobody);
  CHECK(world.chain.begin_fill(5, 1, 1) == nullptr);   // ordered before the placement changed
  CHECK(world.chain.begin_fill(5, 99, 2) == nullptr);  // a server that is not known here
  const auto fill = world.chain.begin_fill(5, 1, 2);
  REQUIRE(fill != nullptr);
  world.chain.image_sent(fill, 7);
  world.send({entry_of(5, 8)});
  const auto done = world.when_held({entry_of(5, 8)});
  CHECK(*done == 0);
  world.chain.give_up(fill);
  CHECK(*done == 1);  // nobody else is to have it
  world.place(5, 3, 2);
  CHECK(world.chain.begin_fill(5, 1, 3) == nullptr);  // another server is behind this one
}

TEST(a_server_behind_gets_the_arrays_of_its_shards_alone) {
  World world;
  world.place(5, 1, 0);
  world.place(6, 1, 1);
  world.place(7, 1, 0);
  const std::shared_ptr<Block> block = world.chain.allocate(96);
  for (size_t i = 0; i < 96; ++i) block->bytes()[i] = static_cast<std::byte>(i);
  std::vector<Chain::Entry> entries;
  for (uint16_t i = 0; i < 3; ++i) {
    Part part = entry_of(static_cast<uint16_t>(5 + i), 1);
    part.values_at = 2;  // eight bytes of keys come first
    entries.push_back({{part}, {block, size_t{32} * i, 32}});
  }
  world.chain.send(Header{}, std::move(entries));
  const auto first = world.chain.next_to_send(0);
  const auto second = world.chain.next_to_send(1);
  REQUIRE(first != nullptr && second != nullptr);
  REQUIRE(first->parts.size() == 2 && second->parts.size() == 1);
  CHECK(first->body_bytes == 64 && second->body_bytes == 32);
  CHECK(first->parts[1].keys_at == 8 && first->parts[1].values_at == 10);
  CHECK(first->body.size() == 2 && first->body[1][0] == std::byte{64});
  CHECK(second->parts[0].values_at == 2 && second->body[0][0] == std::byte{32});
  world.chain.lost(0);  // and again the same
  const auto again = world.chain.next_to_send(0);
  REQUIRE(again != nullptr);
  CHECK(again->parts[1].keys_at == 8 && again->body_bytes == 64);
}
