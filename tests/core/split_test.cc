#include "serve/split.h"

#include <bit>
#include <map>
#include <random>

#include "check.h"
#include "store/store.h"
#include "wire_talk.h"

using namespace shoal;

namespace {

TableSpec ranged(int64_t low, int64_t high) {
  TableSpec spec = make_table(1, 4);
  spec.range_low = low;
  spec.range_high = high;
  return spec;
}

struct Split {
  std::vector<int64_t> keys;
  std::vector<uint32_t> positions;
  SplitKeys split;
};

Split split(const TableSpec& spec, const std::vector<int64_t>& keys, uint32_t shards) {
  Split result{std::vector<int64_t>(keys.size()), std::vector<uint32_t>(keys.size()), {}};
  result.split = split_keys(spec, keys, shards, result.keys.data(), result.positions.data());
  return result;
}

std::vector<float> random_rows(size_t rows, uint32_t dim, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 1e3f);
  std::vector<float> values(rows * dim);
  for (float& x : values) {
    x = normal(random);
  }
  return values;
}

}  // namespace

TEST(a_split_keeps_order_and_positions) {
  std::mt19937_64 random(1);
  std::vector<int64_t> keys(5000);
  for (int64_t& key : keys) {
    key = static_cast<int64_t>(random() % 700) - 300;
  }
  const TableSpec spec = make_table(1, 4);
  for (const uint32_t shards : {1u, 2u, 64u, 4096u}) {
    const Split s = split(spec, keys, shards);
    CHECK_EQ(s.split.begin.front(), 0);
    CHECK_EQ(s.split.begin.back(), keys.size());
    for (uint32_t shard = 0; shard < shards; ++shard) {
      for (uint32_t i = s.split.begin[shard]; i < s.split.begin[shard + 1]; ++i) {
        CHECK_EQ(s.keys[i], keys[s.positions[i]]);
        CHECK_EQ(shard_of_key(spec, s.keys[i], shards), shard);
        CHECK(i == s.split.begin[shard] || s.positions[i - 1] < s.positions[i]);
      }
    }
  }
}

TEST(hashed_keys_of_any_pattern_spread_evenly) {
  for (const int64_t stride : {int64_t{1}, int64_t{64}, int64_t{1} << 32, int64_t{1} << 45}) {
    std::vector<int64_t> keys(64 * 1000);
    for (size_t i = 0; i < keys.size(); ++i) {
      keys[i] = static_cast<int64_t>(i * static_cast<uint64_t>(stride));
    }
    const Split s = split(make_table(1, 4), keys, 64);
    for (uint32_t shard = 0; shard < 64; ++shard) {
      CHECK(s.split.count(shard) > 800 && s.split.count(shard) < 1200);
    }
  }
}

TEST(a_range_is_cut_into_equal_parts_in_order) {
  const TableSpec spec = ranged(0, 6400);
  for (int64_t key = 0; key < 6400; ++key) {
    CHECK_EQ(shard_of_key(spec, key, 64), key / 100);
  }
  CHECK_EQ(shard_of_key(spec, -1, 64), 0);
  CHECK_EQ(shard_of_key(spec, 6400, 64), 63);
}

TEST(a_range_may_be_all_of_int64) {
  const TableSpec spec = ranged(INT64_MIN, INT64_MAX);
  CHECK_EQ(shard_of_key(spec, INT64_MIN, 64), 0);
  CHECK_EQ(shard_of_key(spec, -1, 64), 31);
  CHECK_EQ(shard_of_key(spec, 0, 64), 32);
  CHECK_EQ(shard_of_key(spec, INT64_MAX - 1, 64), 63);
  CHECK_EQ(shard_of_key(spec, INT64_MAX, 64), 63);
}

TEST(a_range_smaller_than_the_shards_still_has_a_place_for_every_key) {
  for (const auto& [low, high] :
       {std::pair<int64_t, int64_t>{5, 6}, {-2, 1}, {INT64_MAX - 1, INT64_MAX}, {INT64_MIN, INT64_MIN + 3}}) {
    for (const int64_t key : {INT64_MIN, int64_t{-3}, int64_t{-1}, int64_t{0}, int64_t{5}, INT64_MAX}) {
      CHECK(shard_of_key(ranged(low, high), key, 64) < 64);
    }
  }
}

TEST(pieces_of_a_tensor_lie_in_neighbouring_shards) {
  const TableSpec spec = make_table(3, 200 * kPieceFloats, true);
  const uint32_t first = shard_of_key(spec, 0, 64);
  for (uint32_t piece = 0; piece < 200; ++piece) {
    CHECK_EQ(shard_of_key(spec, piece, 64), (first + piece) % 64);
  }
}

TEST(duplicates_are_summed_in_order_of_occurrence_to_the_bit) {
  for (const uint32_t dim : {1u, 3u, 16u, 64u}) {
    std::mt19937 random(dim);
    std::vector<int64_t> keys(2000);
    std::vector<uint32_t> positions(keys.size());
    for (size_t i = 0; i < keys.size(); ++i) {
      keys[i] = static_cast<int64_t>(random() % 300) * 1'000'003;
      positions[i] = static_cast<uint32_t>(keys.size() - 1 - i);
    }
    const std::vector<float> rows = random_rows(keys.size(), dim, dim);
    std::map<int64_t, std::vector<float>> expected;
    for (size_t i = 0; i < keys.size(); ++i) {
      const float* row = rows.data() + size_t{positions[i]} * dim;
      const auto [it, fresh] = expected.try_emplace(keys[i], row, row + dim);
      for (uint32_t j = 0; j < dim && !fresh; ++j) {
        it->second[j] += row[j];
      }
    }
    Merger merger;
    for (int again = 0; again < 3; ++again) {  // the scratch is warm from the second time on
      std::vector<int64_t> keys_out(keys.size());
      std::vector<float> sums(rows.size());
      const uint32_t n = merger.merge(PushMode::update, keys, positions.data(), rows.data(), dim,
                                      keys_out.data(), sums.data());
      REQUIRE(n == expected.size());
      for (uint32_t i = 0; i < n; ++i) {
        CHECK(std::memcmp(sums.data() + size_t{i} * dim, expected[keys_out[i]].data(), 4 * dim) == 0);
      }
      CHECK_EQ(keys_out[0], keys[0]);
    }
  }
}

TEST(of_assigned_duplicates_the_last_stays) {
  const std::vector<int64_t> keys{5, 6, 5, 5, 6};
  const std::vector<uint32_t> positions{0, 1, 2, 3, 4};
  const std::vector<float> rows{1, 2, 3, 4, 5};
  std::vector<int64_t> keys_out(5);
  std::vector<float> values(5);
  Merger merger;
  CHECK_EQ(
      merger.merge(PushMode::assign, keys, positions.data(), rows.data(), 1, keys_out.data(), values.data()),
      2);
  CHECK(keys_out[0] == 5 && keys_out[1] == 6);
  CHECK(values[0] == 4.0f && values[1] == 5.0f);
}

TEST(a_merger_takes_small_groups_after_large_ones) {
  Merger merger;
  std::vector<int64_t> keys(10'000);
  std::vector<uint32_t> positions(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    keys[i] = static_cast<int64_t>(i);
    positions[i] = static_cast<uint32_t>(i);
  }
  const std::vector<float> rows(keys.size(), 1.0f);
  std::vector<int64_t> keys_out(keys.size());
  std::vector<float> sums(keys.size());
  for (const size_t count : {size_t{10'000}, size_t{1}, size_t{0}, size_t{17}, size_t{10'000}}) {
    const std::span<const int64_t> group(keys.data(), count);
    CHECK_EQ(
        merger.merge(PushMode::update, group, positions.data(), rows.data(), 1, keys_out.data(), sums.data()),
        count);
  }
}
