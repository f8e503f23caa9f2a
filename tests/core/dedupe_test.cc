#include "store/dedupe.h"

#include <algorithm>
#include <random>
#include <set>

#include "check.h"

using namespace shoal;

namespace {

using Verdict = Dedupe::Verdict;

PushIdentity push(uint64_t seq, uint64_t low, uint32_t incarnation = 1, uint64_t client = 7) {
  return {.client = client, .incarnation = incarnation, .seq = seq, .low = low};
}

// What a shard does: apply and record what is fresh.
Verdict offer(Dedupe& dedupe, const PushIdentity& identity, uint64_t version = 1) {
  const Verdict verdict = dedupe.check(identity).verdict;
  if (verdict == Verdict::fresh) {
    dedupe.record(identity, version);
  }
  return verdict;
}

}  // namespace

TEST(a_push_is_fresh_once) {
  Dedupe dedupe;
  CHECK(offer(dedupe, push(1, 1), 41) == Verdict::fresh);
  CHECK(offer(dedupe, push(1, 1)) == Verdict::duplicate);
  CHECK_EQ(dedupe.check(push(1, 1)).version, 41);
}

TEST(pushes_may_come_in_any_order_within_the_window) {
  std::vector<uint64_t> seqs(kOpenPushesMax);
  for (size_t i = 0; i < seqs.size(); ++i) {
    seqs[i] = i + 1;
  }
  for (uint32_t seed = 0; seed < 20; ++seed) {
    std::shuffle(seqs.begin(), seqs.end(), std::mt19937(seed));
    Dedupe dedupe;
    for (const uint64_t seq : seqs) {
      CHECK(offer(dedupe, push(seq, 1)) == Verdict::fresh);
    }
    for (const uint64_t seq : seqs) {
      CHECK(offer(dedupe, push(seq, 1)) == Verdict::duplicate);
    }
  }
}

TEST(a_push_beyond_the_window_is_told_so) {
  Dedupe dedupe;
  CHECK(dedupe.check(push(kOpenPushesMax, 1)).verdict == Verdict::fresh);
  CHECK(dedupe.check(push(kOpenPushesMax + 1, 1)).verdict == Verdict::outside_window);
  CHECK(dedupe.check(push(1 + kOpenPushesMax, 2)).verdict == Verdict::fresh);
}

TEST(what_lies_below_low_is_a_duplicate) {
  Dedupe dedupe;
  CHECK(offer(dedupe, push(5, 1)) == Verdict::fresh);
  CHECK(offer(dedupe, push(20, 18)) == Verdict::fresh);
  CHECK(dedupe.check(push(5, 1)).verdict == Verdict::duplicate);
  CHECK(dedupe.check(push(17, 1)).verdict == Verdict::duplicate);  // never seen here, acknowledged elsewhere
  CHECK(dedupe.check(push(18, 1)).verdict == Verdict::fresh);
}

TEST(low_never_falls) {
  Dedupe dedupe;
  CHECK(offer(dedupe, push(300, 290)) == Verdict::fresh);
  CHECK(offer(dedupe, push(295, 40)) == Verdict::fresh);  // delayed on the way
  CHECK(dedupe.check(push(41, 40)).verdict == Verdict::duplicate);
}

TEST(clients_are_told_apart) {
  Dedupe dedupe;
  CHECK(offer(dedupe, push(1, 1, 1, 7)) == Verdict::fresh);
  CHECK(offer(dedupe, push(1, 1, 1, 8)) == Verdict::fresh);
  CHECK_EQ(dedupe.clients(), 2);
}

TEST(a_newer_incarnation_begins_anew_and_fences_the_older) {
  Dedupe dedupe;
  CHECK(offer(dedupe, push(9, 1, 1)) == Verdict::fresh);
  CHECK(offer(dedupe, push(1, 1, 2)) == Verdict::fresh);
  CHECK(dedupe.check(push(10, 1, 1)).verdict == Verdict::fenced);
  CHECK(dedupe.check(push(9, 1, 1)).verdict == Verdict::fenced);
  CHECK(dedupe.check(push(9, 1, 2)).verdict == Verdict::fresh);
}

TEST(a_fence_needs_no_push) {
  Dedupe dedupe;
  dedupe.fence(7, 3);
  CHECK(dedupe.check(push(1, 1, 2)).verdict == Verdict::fenced);
  CHECK(offer(dedupe, push(1, 1, 3)) == Verdict::fresh);
  dedupe.fence(7, 2);  // too late to count
  CHECK(dedupe.check(push(1, 1, 3)).verdict == Verdict::duplicate);
}

TEST(a_client_that_ended_is_forgotten_unless_a_newer_one_came) {
  Dedupe dedupe;
  CHECK(offer(dedupe, push(1, 1, 2)) == Verdict::fresh);
  dedupe.forget(7, 1);
  CHECK(dedupe.check(push(1, 1, 2)).verdict == Verdict::duplicate);
  dedupe.forget(7, 2);
  CHECK(dedupe.check(push(1, 1, 2)).verdict == Verdict::fresh);
  CHECK(dedupe.check(push(1, 1, 1)).verdict == Verdict::fenced);
  CHECK(offer(dedupe, push(1, 1, 1, 8)) == Verdict::fresh);
  dedupe.forget(8, 1);
  CHECK_EQ(dedupe.clients(), 1);  // of those that are the first of their name nothing is kept
}

TEST(a_fence_stays_when_the_records_of_another_shard_are_taken_over) {
  Dedupe here;
  Dedupe there;
  here.fence(7, 3);
  CHECK(offer(there, push(1, 1, 2)) == Verdict::fresh);
  CHECK(offer(there, push(1, 1, 2, 8)) == Verdict::fresh);
  std::vector<std::byte> bytes;
  there.encode(bytes);
  std::span<const std::byte> in(bytes);
  CHECK(here.decode(in));
  CHECK(here.check(push(2, 1, 2)).verdict == Verdict::fenced);
  CHECK(here.check(push(1, 1, 2, 8)).verdict == Verdict::duplicate);
}

// Whatever a broken client sends, the record stays within its window (record asserts that).
TEST(no_numbers_from_a_peer_break_the_window) {
  std::mt19937_64 random(3);
  Dedupe dedupe;
  const uint64_t edges[] = {0, 1, 255, 256, 257, UINT64_MAX - 257, UINT64_MAX - 1, UINT64_MAX};
  const auto number = [&] { return random() % 3 == 0 ? edges[random() % 8] : random() % 1000; };
  for (int i = 0; i < 200'000; ++i) {
    offer(dedupe, push(number(), number(), static_cast<uint32_t>(random() % 2), random() % 3));
  }
  CHECK(dedupe.clients() <= 3);
}

TEST(a_run_with_retries_and_reorders_applies_each_seq_once) {
  for (uint32_t seed = 0; seed < 50; ++seed) {
    std::mt19937 random(seed);
    Dedupe dedupe;
    std::set<uint64_t> open;
    std::multiset<uint64_t> applied;
    uint64_t next = 1;
    while (next < 2000 || !open.empty()) {
      const uint64_t low = open.empty() ? next : *open.begin();
      if (next < 2000 && next < low + kOpenPushesMax && random() % 3 == 0) {
        open.insert(next++);
      } else if (!open.empty()) {
        const auto it = std::next(open.begin(), static_cast<ptrdiff_t>(random() % open.size()));
        if (offer(dedupe, push(*it, low)) == Verdict::fresh) {
          applied.insert(*it);
        }
        if (random() % 2 == 0) {
          open.erase(it);  // the acknowledgement arrived
        }
      }
    }
    CHECK_EQ(applied.size(), 1999);
    CHECK_EQ(std::set<uint64_t>(applied.begin(), applied.end()).size(), 1999);
  }
}
