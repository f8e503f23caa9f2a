#include "store/table_rows.h"

#include <cmath>
#include <cstring>
#include <set>

#include "check.h"
#include "wire_talk.h"

using namespace shoal;

namespace {

std::shared_ptr<const TableSpec> spec_of(uint64_t dim, OptimizerKind kind = OptimizerKind::sgd) {
  TableSpec spec = make_table(1, dim);
  spec.optimizer.kind = kind;
  if (kind == OptimizerKind::adagrad) {
    spec.optimizer.eps = 1e-10f;
  }
  spec.init = {.kind = InitKind::uniform, .a = -1.0f, .b = 1.0f, .salt = spec.init.salt};
  return std::make_shared<const TableSpec>(spec);
}

const std::byte* raw(const std::vector<float>& values) {
  return reinterpret_cast<const std::byte*>(values.data());
}

std::vector<float> pull(const TableRows& rows, const std::vector<int64_t>& keys) {
  std::vector<float> out(keys.size() * rows.spec().dim);
  CHECK(rows.pull(keys, {.out = reinterpret_cast<std::byte*>(out.data())}));
  return out;
}

std::vector<int64_t> keys_up_to(int64_t count) {
  std::vector<int64_t> keys;
  for (int64_t key = 0; key < count; ++key) {
    keys.push_back(key * 3 - count);
  }
  return keys;
}

}  // namespace

TEST(a_pull_stores_nothing_and_repeats_itself) {
  TableRows rows(spec_of(5));
  const auto keys = keys_up_to(1000);
  const auto first = pull(rows, keys);
  CHECK_EQ(rows.size(), 0);
  CHECK_EQ(rows.memory_bytes(), 0);
  CHECK(pull(rows, keys) == first);
}

TEST(a_row_is_born_with_its_first_value) {
  TableRows rows(spec_of(5));
  const auto keys = keys_up_to(300);
  const auto before = pull(rows, keys);
  const std::vector<float> zeros(before.size());
  CHECK(rows.push(keys, Codec::fp32, raw(zeros), 1.0f, 1, 0));
  CHECK_EQ(rows.size(), keys.size());
  CHECK(pull(rows, keys) == before);
}

TEST(rows_of_every_dim_keep_apart) {
  for (const uint64_t dim : {1u, 2u, 3u, 5u, 7u, 8u, 15u, 16u, 17u, 31u, 33u, 64u, 100u, 4096u}) {
    for (const auto kind : {OptimizerKind::sgd, OptimizerKind::adagrad}) {
      TableRows rows(spec_of(dim, kind));
      const auto keys = keys_up_to(dim > 1000 ? 40 : 400);
      std::vector<float> values(keys.size() * dim);
      for (size_t i = 0; i < values.size(); ++i) {
        values[i] = static_cast<float>(i);
      }
      CHECK(rows.assign(keys, raw(values), 1, 0));
      CHECK(pull(rows, keys) == values);
      const std::vector<float> grads(values.size(), 1.0f);
      CHECK(rows.push(keys, Codec::fp32, raw(grads), 1.0f, 2, 0));
      const auto after = pull(rows, keys);
      float worst = 0.0f;
      for (size_t i = 0; i < values.size(); ++i) {
        worst = std::max(worst, std::fabs(after[i] - (values[i] - 1.0f)));
      }
      CHECK(worst < 0.02f);  // the first step of Adagrad is lr * g / |g|
    }
  }
}

TEST(positions_scatter_and_are_bounded) {
  TableRows rows(spec_of(2));
  const std::vector<int64_t> keys{1, 2, 3};
  const auto plain = pull(rows, keys);
  std::vector<float> out(10, 7.0f);
  const std::vector<uint32_t> positions{4, 0, 2};
  PullTarget target{.out = reinterpret_cast<std::byte*>(out.data()), .positions = positions.data()};
  target.positions_end = 5;
  CHECK(rows.pull(keys, target));
  CHECK(out[8] == plain[0] && out[0] == plain[2] && out[4] == plain[4] && out[2] == 7.0f);
  target.positions_end = 4;
  std::vector<float> untouched(10, 7.0f);
  target.out = reinterpret_cast<std::byte*>(untouched.data());
  CHECK(!rows.pull(keys, target));
  CHECK(untouched[8] == 7.0f && untouched[9] == 7.0f);
}

TEST(rows_travel_in_every_codec) {
  TableRows rows(spec_of(3));
  const std::vector<int64_t> keys{1, 2, 3, 4, 5};
  const std::vector<float> values{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  CHECK(rows.assign(keys, raw(values), 1, 0));
  for (const Codec codec : {Codec::fp32, Codec::fp16, Codec::bf16, Codec::int8}) {
    Bytes wire(keys.size() * encoded_bytes(codec, 3));
    CHECK(rows.pull(keys, {.out = wire.data(), .codec = codec}));
    std::vector<float> back(values.size());
    decode_rows(codec, wire.data(), keys.size(), 3, back.data());
    for (size_t i = 0; i < back.size(); ++i) {
      CHECK(std::fabs(back[i] - values[i]) <= 0.07f);
    }
    TableRows other(spec_of(3));
    const std::vector<float> zeros(values.size());
    CHECK(other.assign(keys, raw(zeros), 1, 0));
    CHECK(other.push(keys, codec, wire.data(), 1.0f, 1, 0));
    for (size_t i = 0; i < back.size(); ++i) {
      back[i] = -back[i];
    }
    CHECK(pull(other, keys) == back);
  }
}

TEST(a_table_that_grows_keeps_its_rows) {
  TableRows rows(spec_of(4));
  for (int64_t key = 0; key < 60'000; key += 500) {
    std::vector<int64_t> keys;
    std::vector<float> values;
    for (int64_t k = key; k < key + 500; ++k) {
      keys.push_back(k);
      values.insert(values.end(), 4, static_cast<float>(k));
    }
    CHECK(rows.assign(keys, raw(values), 1, 0));
  }
  CHECK_EQ(rows.size(), 60'000);
  size_t seen = 0;
  std::optional<uint64_t> cursor = 0;
  while (cursor) {
    const ScanPage page = rows.scan(*cursor, 1000);
    for (size_t i = 0; i < page.keys.size(); ++i) {
      CHECK(page.values[4 * i + 3] == static_cast<float>(page.keys[i]));
    }
    seen += page.keys.size();
    cursor = page.next;
  }
  CHECK_EQ(seen, 60'000);
}

// 16 floats of value fill a line; one more would take another line with it.
TEST(a_scalar_of_the_state_costs_no_cache_line) {
  const auto keys = keys_up_to(100'000);
  const std::vector<float> zeros(keys.size() * 16);
  const auto bytes_a_row = [&](OptimizerKind kind) {
    TableRows rows(spec_of(16, kind));
    CHECK(rows.push(keys, Codec::fp32, raw(zeros), 1.0f, 1, 0));
    return static_cast<double>(rows.memory_bytes()) / static_cast<double>(keys.size());
  };
  CHECK(bytes_a_row(OptimizerKind::rowwise_adagrad) - bytes_a_row(OptimizerKind::sgd) < 12.0);
}

TEST(an_empty_batch_is_nothing) {
  TableRows rows(spec_of(4));
  CHECK(rows.push({}, Codec::fp32, nullptr, 1.0f, 1, 0));
  CHECK(rows.assign({}, nullptr, 1, 0));
  CHECK(pull(rows, {}).empty());
  CHECK_EQ(rows.size(), 0);
}
