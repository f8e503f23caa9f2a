#include "store/index.h"

#include <algorithm>
#include <random>
#include <set>
#include <unordered_map>

#include "check.h"

using namespace shoal;

namespace {

uint64_t hash_of(int64_t key) { return mix64(static_cast<uint64_t>(key)); }

// The key whose hash is `hash`: mix64 backwards.
int64_t key_with_hash(uint64_t hash) {
  uint64_t x = hash;
  x = (x ^ (x >> 31) ^ (x >> 62)) * 0x319642b2d24d8ec3ULL;
  x = (x ^ (x >> 27) ^ (x >> 54)) * 0x96de1b173f119089ULL;
  x = x ^ (x >> 30) ^ (x >> 60);
  return static_cast<int64_t>(x - 0x9e3779b97f4a7c15ULL);
}

void insert_all(Index& index, const std::vector<int64_t>& keys) {
  for (size_t i = 0; i < keys.size(); ++i) {
    CHECK(index.insert(keys[i], hash_of(keys[i]), static_cast<uint32_t>(i)));
  }
}

void check_all(const Index& index, const std::vector<int64_t>& keys) {
  CHECK_EQ(index.size(), keys.size());
  size_t wrong = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    wrong += index.find(keys[i], hash_of(keys[i])) != i ? 1 : 0;
  }
  CHECK_EQ(wrong, 0);
}

std::vector<std::pair<int64_t, uint32_t>> scan_all(const Index& index, size_t limit) {
  std::vector<std::pair<int64_t, uint32_t>> found;
  std::optional<uint64_t> cursor = 0;
  while (cursor) {
    cursor = index.scan(*cursor, limit, found);
  }
  return found;
}

std::vector<int64_t> pattern(size_t count, int64_t (*key)(int64_t)) {
  std::vector<int64_t> keys(count);
  for (size_t i = 0; i < count; ++i) {
    keys[i] = key(static_cast<int64_t>(i));
  }
  return keys;
}

}  // namespace

TEST(an_empty_index_finds_and_scans_nothing) {
  const Index index;
  CHECK_EQ(index.find(0, hash_of(0)), Index::kAbsent);
  CHECK(scan_all(index, 10).empty());
}

TEST(an_index_agrees_with_a_map_over_many_growths) {
  std::mt19937_64 random(1);
  Index index;
  std::unordered_map<int64_t, uint32_t> map;
  size_t wrong = 0;
  while (map.size() < 200'000) {
    const auto key = static_cast<int64_t>(random() % 1'000'000) - 500'000;
    const auto known = map.find(key);
    const uint32_t expected = known == map.end() ? Index::kAbsent : known->second;
    wrong += index.find(key, hash_of(key)) != expected ? 1 : 0;
    if (known == map.end()) {
      const auto slot = static_cast<uint32_t>(map.size());
      CHECK(index.insert(key, hash_of(key), slot));
      map[key] = slot;
    }
  }
  CHECK_EQ(wrong, 0);
  CHECK_EQ(index.size(), map.size());
}

TEST(an_index_takes_every_pattern_of_keys) {
  const auto sequential = [](int64_t i) { return i; };
  const auto negative = [](int64_t i) { return -i; };
  const auto high_bits = [](int64_t i) { return static_cast<int64_t>(static_cast<uint64_t>(i) << 32); };
  const auto extreme = [](int64_t i) { return i % 2 == 0 ? INT64_MIN + i : INT64_MAX - i; };
  for (auto* key : {+sequential, +negative, +high_bits, +extreme}) {
    Index index;
    const auto keys = pattern(50'000, key);
    insert_all(index, keys);
    check_all(index, keys);
    CHECK_EQ(scan_all(index, 1000).size(), keys.size());
  }
}

TEST(the_backward_hash_of_these_tests_is_right) {
  for (const int64_t key : {int64_t{0}, int64_t{-1}, int64_t{123456789}, INT64_MIN, INT64_MAX}) {
    CHECK_EQ(key_with_hash(hash_of(key)), key);
  }
}

// Keys chosen so that all of them have the same home bucket: slow, but right.
TEST(an_index_takes_keys_of_one_hash) {
  for (const uint64_t low : {uint64_t{0}, uint64_t{0x80000000}, uint64_t{0xffffffff}}) {
    std::vector<int64_t> keys(1500);
    for (size_t i = 0; i < keys.size(); ++i) {
      keys[i] = key_with_hash((uint64_t{i} << 32) | low);
    }
    Index index;
    insert_all(index, keys);
    check_all(index, keys);
    CHECK_EQ(scan_all(index, 100).size(), keys.size());
  }
}

TEST(a_scan_gives_every_key_once) {
  Index index;
  const auto keys = pattern(30'000, [](int64_t i) { return i * 7; });
  insert_all(index, keys);
  for (const size_t limit : {size_t{1}, size_t{100}, size_t{1'000'000}, SIZE_MAX}) {
    if (limit == 1 && keys.size() > 1000) {
      std::vector<std::pair<int64_t, uint32_t>> some;
      CHECK(index.scan(0, limit, some).has_value());  // a page of one is small
      CHECK(some.size() < 100);
      continue;
    }
    const auto found = scan_all(index, limit);
    std::set<int64_t> distinct;
    for (const auto& [key, slot] : found) {
      distinct.insert(key);
      CHECK_EQ(slot, index.find(key, hash_of(key)));
    }
    CHECK_EQ(found.size(), keys.size());
    CHECK_EQ(distinct.size(), keys.size());
  }
}

TEST(a_scan_is_complete_and_exact_while_the_index_grows) {
  std::mt19937_64 random(2);
  for (const size_t already : {1u, 100u, 5000u, 20'000u}) {
    Index index;
    const auto keys = pattern(already, [](int64_t i) { return i; });
    insert_all(index, keys);
    std::vector<std::pair<int64_t, uint32_t>> found;
    std::optional<uint64_t> cursor = 0;
    uint32_t next = static_cast<uint32_t>(already);
    while (cursor) {
      cursor = index.scan(*cursor, 1 + random() % 500, found);
      for (size_t n = random() % 700; n > 0; --n, ++next) {
        CHECK(index.insert(next, hash_of(next), next));
      }
    }
    std::set<int64_t> distinct;
    for (const auto& entry : found) {
      CHECK(distinct.insert(entry.first).second);
      CHECK_EQ(entry.first, static_cast<int64_t>(entry.second));
    }
    CHECK(std::all_of(keys.begin(), keys.end(), [&](int64_t key) { return distinct.contains(key); }));
  }
}

// Settled, 5 keys to a line of 64 bytes at 53 to 80 % full; while it grows, the old array lies beside.
TEST(an_index_costs_at_most_40_bytes_a_key) {
  Index index;
  size_t most = 0;
  for (int64_t key = 0; key < 2'000'000; ++key) {
    CHECK(index.insert(key, hash_of(key), static_cast<uint32_t>(key)));
    if (key > 1'000'000) {
      most = std::max(most, index.memory_bytes() * 10 / static_cast<size_t>(key + 1));
    }
  }
  CHECK(most <= 450);
  CHECK(index.memory_bytes() <= 40 * index.size());
}

// The old array lies beside the new one until it is empty, so memory shows how long that takes: were all keys
// moved at once, it would never fall.
TEST(an_insert_moves_a_few_lines_of_an_index_that_grows) {
  Index index;
  size_t old_lines = 0;
  int64_t began = 0;
  int growths = 0;
  for (int64_t key = 0; key < 1'000'000; ++key) {
    const size_t before = index.memory_bytes();
    CHECK(index.insert(key, hash_of(key), static_cast<uint32_t>(key)));
    if (index.memory_bytes() > before) {
      old_lines = before / 64;
      began = key;
    } else if (index.memory_bytes() < before) {
      CHECK(old_lines / static_cast<size_t>(key - began + 1) < 8);
      ++growths;
    }
  }
  CHECK(growths > 20);
}
