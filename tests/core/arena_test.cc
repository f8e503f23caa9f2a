// What every arena does is one suite, run on both kinds; below it what each does alone.
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "net/shm.h"

using namespace shoal;

namespace {

constexpr size_t mib = size_t{1} << 20;

// Runs the case on a shared and on a heap arena, both with room for 64 MiB.
void on_every_arena(const std::function<void(std::shared_ptr<Arena>)>& body) {
  body(make_shared_arena(mib, 64 * mib));
  body(make_heap_arena(64 * mib));
}

bool all_are(std::span<const std::byte> bytes, std::byte value) {
  for (const std::byte byte : bytes) {
    if (byte != value) return false;
  }
  return true;
}

void fill(std::span<std::byte> bytes, std::byte value) {
  std::memset(bytes.data(), std::to_integer<int>(value), bytes.size());
}

// Holds up to 8 blocks at a time, each filled with a value of its own, and checks each before it goes.
void churn(Arena& arena, unsigned seed, int turns) {
  struct Held {
    std::shared_ptr<Block> block;
    std::byte value;
  };
  std::mt19937 random(seed);
  std::vector<Held> held(8);
  for (int turn = 0; turn < turns; ++turn) {
    Held& slot = held[random() % held.size()];
    CHECK(slot.block == nullptr || all_are(slot.block->bytes(), slot.value));
    const size_t bytes = random() % (random() % 8 == 0 ? 100'000U : 2'000U);
    slot = {arena.allocate(bytes), static_cast<std::byte>(random())};
    if (slot.block == nullptr) {
      CHECK(slot.block != nullptr);
      return;
    }
    fill(slot.block->bytes(), slot.value);
  }
}

}  // namespace

TEST(blocks_are_aligned_and_large_enough) {
  on_every_arena([](auto arena) {
    for (const size_t bytes :
         {size_t{0}, size_t{1}, size_t{64}, size_t{65}, size_t{4095}, size_t{5000}, mib, 3 * mib + 1}) {
      const auto block = arena->allocate(bytes);
      REQUIRE(block != nullptr);
      CHECK(block->bytes().size() >= bytes);
      CHECK_EQ(reinterpret_cast<uintptr_t>(block->bytes().data()) % 64, 0);
      fill(block->bytes(), std::byte{1});
    }
  });
}

TEST(a_freed_block_is_handed_out_again) {
  on_every_arena([](auto arena) {
    for (const size_t bytes : {size_t{100}, size_t{10'000}, 5 * mib}) {
      const auto* first = arena->allocate(bytes)->bytes().data();
      CHECK(arena->allocate(bytes)->bytes().data() == first);
    }
  });
}

TEST(a_request_beyond_all_bounds_gives_null) {
  on_every_arena([](auto arena) {
    CHECK(arena->allocate(SIZE_MAX) == nullptr);
    CHECK(arena->allocate(SIZE_MAX / 2 + 1) == nullptr);
    CHECK(arena->allocate(100) != nullptr);
  });
}

TEST(a_block_outlives_its_arena) {
  on_every_arena([](auto arena) {
    const auto small = arena->allocate(100);
    const auto large = arena->allocate(4 * mib);
    arena = nullptr;
    fill(small->bytes(), std::byte{1});
    fill(large->bytes(), std::byte{2});
    CHECK(all_are(small->bytes(), std::byte{1}));
  });
}

TEST(blocks_of_many_threads_never_overlap) {
  on_every_arena([](auto arena) {
    std::vector<std::jthread> threads;
    for (unsigned seed = 0; seed < 4; ++seed) {
      threads.emplace_back([arena, seed] { churn(*arena, seed, 3'000); });
    }
  });
}

TEST(a_block_may_die_in_another_thread_and_after_the_arena) {
  on_every_arena([](auto arena) {
    std::jthread other([block = arena->allocate(mib)]() mutable {
      fill(block->bytes(), std::byte{3});
      block = nullptr;
    });
    arena = nullptr;
  });
}

TEST(a_shared_block_says_where_it_lies) {
  const auto arena = make_shared_arena(mib, 64 * mib);
  for (const size_t bytes : {size_t{100}, size_t{4096}, 2 * mib}) {
    const auto block = arena->allocate(bytes);
    REQUIRE(block != nullptr && block->segment() != nullptr);
    CHECK(block->segment()->id() != 0);
    CHECK(block->segment()->bytes().data() + block->offset() == block->bytes().data());
    CHECK_EQ(block->offset() % (bytes < 4096 ? 64 : 4096), 0);
  }
  CHECK(make_heap_arena(0)->allocate(1)->segment() == nullptr);
}

TEST(segments_are_numbered_and_never_twice) {
  const auto arena = make_shared_arena(mib, 64 * mib);
  const auto first = arena->allocate(mib);
  const auto second = arena->allocate(mib);
  const auto third = arena->allocate(mib);
  CHECK_EQ(first->segment()->id(), 1);
  CHECK_EQ(second->segment()->id(), 2);
  CHECK_EQ(third->segment()->id(), 3);
}

TEST(turns_of_large_blocks_do_not_grow_a_shared_arena) {
  const auto arena = make_shared_arena(16 * mib, 64 * mib);
  const auto long_lived = arena->allocate(100);
  for (int turn = 0; turn < 100; ++turn) {
    const auto one = arena->allocate(7 * mib);
    auto two = arena->allocate(5 * mib);
    two = nullptr;
    const auto three = arena->allocate(8 * mib + static_cast<size_t>(turn) * 64);
    CHECK(one != nullptr && three != nullptr);
  }
  CHECK_EQ(arena->bytes_mapped(), 16 * mib);
}

TEST(a_shared_arena_stops_at_its_limit) {
  const auto arena = make_shared_arena(4 * mib, 10 * mib);
  const auto one = arena->allocate(4 * mib);
  const auto two = arena->allocate(4 * mib);
  CHECK(arena->allocate(4 * mib) == nullptr);
  const auto three = arena->allocate(2 * mib);  // a smaller segment still fits
  CHECK(one != nullptr && two != nullptr && three != nullptr);
  CHECK(arena->allocate(1) == nullptr);
  CHECK_EQ(arena->bytes_mapped(), 10 * mib);
}

TEST(free_segments_make_room_for_a_larger_one) {
  const auto arena = make_shared_arena(mib, 10 * mib);
  arena->allocate(3 * mib);
  arena->allocate(4 * mib);
  CHECK(arena->allocate(9 * mib) != nullptr);
  CHECK_EQ(arena->bytes_mapped(), 9 * mib);
}

TEST(a_request_that_can_not_fit_costs_no_warm_segment) {
  const auto arena = make_shared_arena(mib, 10 * mib);
  const auto held = arena->allocate(3 * mib);
  arena->allocate(4 * mib);
  CHECK(arena->allocate(8 * mib) == nullptr);
  CHECK_EQ(arena->bytes_mapped(), 7 * mib);
}

TEST(a_heap_arena_keeps_no_more_than_it_may) {
  const auto arena = make_heap_arena(4 * mib);
  std::vector<std::shared_ptr<Block>> blocks;
  for (int i = 0; i < 10; ++i) {
    blocks.push_back(arena->allocate(mib));
  }
  CHECK_EQ(arena->bytes_mapped(), 10 * mib);
  blocks.clear();
  CHECK_EQ(arena->bytes_mapped(), 4 * mib);
  arena->allocate(8 * mib);  // larger than all that may be kept: costs none of the others
  CHECK_EQ(arena->bytes_mapped(), 4 * mib);
}

TEST(a_heap_arena_lets_go_of_the_size_that_was_used_longest_ago) {
  const auto arena = make_heap_arena(4 * mib);
  arena->allocate(2 * mib);
  const auto* warm = arena->allocate(mib)->bytes().data();
  arena->allocate(3 * mib);
  CHECK_EQ(arena->bytes_mapped(), 4 * mib);  // 1 and 3 MiB; the 2 went
  CHECK(arena->allocate(mib)->bytes().data() == warm);
}

TEST(a_large_heap_block_is_aligned_for_huge_pages) {
  const auto block = make_heap_arena(0)->allocate(5 * mib);
  CHECK_EQ(reinterpret_cast<uintptr_t>(block->bytes().data()) % (2 * mib), 0);
}

TEST(a_heap_block_wastes_at_most_an_eighth) {
  const auto arena = make_heap_arena(0);
  for (size_t bytes = 512; bytes < 40 * mib; bytes = bytes * 21 / 20 + 1) {
    const size_t got = arena->allocate(bytes)->bytes().size();
    CHECK(got >= bytes && got <= bytes + bytes / 8 + 64);
  }
}
