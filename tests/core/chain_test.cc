// A reply waits for all that it speaks for, and nothing that was sent is forgotten before it is answered.
#include "serve/chain.h"

#include <vector>

#include "check.h"

using namespace shoal;

namespace {

struct World {
  int woken = 0;
  Chain chain{3, 1, 2, [this] { ++woken; }};

  void send(uint32_t next, std::vector<Chain::Mark> marks) {
    chain.send(next, Header{}, {}, std::vector<std::byte>(8), std::move(marks));
  }
  bool answer(uint32_t server, uint64_t request, Code code = Code::ok) {
    Header header;
    header.request = request;
    header.code = static_cast<uint16_t>(code);
    return chain.on_reply(server, {header, {}, {}});
  }
};

}  // namespace

TEST(a_reply_waits_until_every_shard_is_held) {
  World world;
  int done = 0;
  world.send(0, {{5, 1}});
  world.send(1, {{6, 1}});
  world.chain.when_held(std::vector<Chain::Mark>{{5, 1}, {6, 1}}, [&] { ++done; });
  CHECK_EQ(world.woken, 2);
  const auto first = world.chain.next_to_send(0);
  const auto second = world.chain.next_to_send(1);
  CHECK_EQ(first->header.client, kServerClients + 3);
  CHECK(world.answer(0, first->header.request));
  CHECK_EQ(done, 0);
  CHECK(world.answer(1, second->header.request));
  CHECK_EQ(done, 1);
  CHECK(world.answer(1, second->header.request));  // again: nothing
  CHECK_EQ(done, 1);
  world.chain.when_held(std::vector<Chain::Mark>{{5, 1}}, [&] { ++done; });
  CHECK_EQ(done, 2);  // at once
}

TEST(a_later_entry_holds_the_earlier_ones) {
  World world;
  int done = 0;
  world.send(0, {{5, 1}});
  world.send(0, {{5, 2}});
  for (const uint64_t entry : {1, 2, 3}) {
    world.chain.when_held(std::vector<Chain::Mark>{{5, entry}}, [&] { ++done; });
  }
  world.chain.next_to_send(0);
  CHECK(world.answer(0, world.chain.next_to_send(0)->header.request));
  CHECK_EQ(done, 2);
  world.chain.alone(5, 9);  // the server behind is gone, and nobody else is waited for
  CHECK_EQ(done, 3);
}

TEST(what_a_lost_connection_owes_is_sent_again) {
  World world;
  world.send(0, {{5, 1}});
  const auto sent = world.chain.next_to_send(0);
  CHECK(world.chain.next_to_send(0) == nullptr);
  world.chain.lost(0);
  CHECK(world.chain.next_to_send(0) == sent);
  CHECK(!world.answer(0, sent->header.request, Code::moved));
  CHECK(world.chain.has_open(0));
}
