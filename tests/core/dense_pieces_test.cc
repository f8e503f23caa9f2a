#include "store/dense_pieces.h"

#include <cstring>

#include "check.h"
#include "failing_memory.h"
#include "store/shard.h"
#include "wire_talk.h"

using namespace shoal;

namespace {

// Two whole pieces and one of 5 elements.
constexpr uint64_t kSize = 2 * kPieceFloats + 5;

std::shared_ptr<const TableSpec> spec() {
  return std::make_shared<const TableSpec>(make_table(1, kSize, true));
}

std::vector<float> pull(const DensePieces& pieces, int64_t piece) {
  std::vector<float> out(pieces.spec().floats(piece));
  pieces.pull(piece, Codec::fp32, reinterpret_cast<std::byte*>(out.data()));
  return out;
}

const std::byte* raw(const std::vector<float>& values) {
  return reinterpret_cast<const std::byte*>(values.data());
}

// A push of pieces to a shard, with as many bytes as said.
Code push(Shard& shard, const std::vector<int64_t>& keys, Codec codec, size_t bytes,
          PushMode mode = PushMode::update) {
  const Bytes values(bytes);
  PushPart part{.table = 1, .term = 1, .mode = mode, .codec = codec, .lr = 1.0f};
  part.keys = keys;
  part.values = values;
  return shard.push(nullptr, {&part, 1}, 0).status.code();
}

}  // namespace

TEST(a_prepared_piece_is_pushed_to_without_more_memory) {
  DensePieces pieces(spec());
  const std::vector<float> ones(kPieceFloats, 1.0f);
  CHECK(pieces.prepare(0, false));
  allocations_left = 0;
  CHECK(pieces.push(0, Codec::fp32, raw(ones), 1.0f, 1));
  CHECK(pieces.push_compensated(0, Codec::fp32, raw(ones), raw(ones), 0.5f, 1.0f, 2));
  allocations_left = -1;
  CHECK_EQ(pull(pieces, 0)[7], -1.0f);  // 0 - 1 - (1 + 0.5 * (-1 - 1)) = -1
}

TEST(the_last_piece_is_what_is_left) {
  DensePieces pieces(spec());
  CHECK_EQ(pieces.spec().pieces(), 3);
  CHECK_EQ(pieces.spec().floats(0), kPieceFloats);
  CHECK_EQ(pieces.spec().floats(2), 5);
  CHECK(pieces.spec().has_piece(2) && !pieces.spec().has_piece(3) && !pieces.spec().has_piece(-1));
  CHECK(!pieces.spec().has_piece(INT64_MIN) && !pieces.spec().has_piece(INT64_MAX));
}

TEST(a_piece_is_born_by_its_first_write) {
  DensePieces pieces(spec());
  CHECK(pull(pieces, 2) == std::vector<float>(5));
  CHECK_EQ(pieces.size(), 0);
  const std::vector<float> grad{1, 2, 3, 4, 5};
  CHECK_EQ(pieces.version(2), 0);
  CHECK(pieces.push(2, Codec::fp32, raw(grad), 0.5f, 41));
  CHECK_EQ(pieces.version(2), 41);
  CHECK(pull(pieces, 2) == (std::vector<float>{-0.5f, -1.0f, -1.5f, -2.0f, -2.5f}));
  CHECK_EQ(pieces.size(), 1);
}

TEST(the_first_value_counts_and_an_assigned_one_replaces) {
  DensePieces pieces(spec());
  const std::vector<float> one(5, 1.0f);
  const std::vector<float> two(5, 2.0f);
  CHECK(pieces.init_once(2, raw(one), 1));
  CHECK(pieces.init_once(2, raw(two), 2));
  CHECK(pull(pieces, 2) == one);
  CHECK(pieces.assign(2, raw(two), 3));
  CHECK(pull(pieces, 2) == two);
}

TEST(a_piece_of_an_odd_size_is_pushed_in_every_codec) {
  for (const Codec codec : {Codec::fp32, Codec::fp16, Codec::bf16, Codec::int8}) {
    DensePieces pieces(spec());
    const std::vector<float> grad{1, 1, 1, 1, 1};
    Bytes wire(encoded_bytes(codec, 5));
    encode_rows(codec, grad.data(), 1, 5, wire.data());
    CHECK(pieces.push(2, codec, wire.data(), 1.0f, 1));
    CHECK(pull(pieces, 2) == std::vector<float>(5, -1.0f));
  }
}

TEST(a_shard_refuses_pieces_that_do_not_exist) {
  Shard shard(0);
  CHECK(shard.declare(spec()).ok());
  CHECK(push(shard, {0, 3}, Codec::fp32, 4 * (kPieceFloats + 5)) == Code::refused);
  CHECK(push(shard, {-1}, Codec::fp32, 4 * kPieceFloats) == Code::refused);
  CHECK(push(shard, {INT64_MIN}, Codec::fp32, 4 * kPieceFloats) == Code::refused);
  Bytes out(4 * kPieceFloats);
  const int64_t absent = 3;
  CHECK(shard.pull({.table = 1, .term = 1, .keys = {&absent, 1}}, {.out = out.data()}).status.code() ==
        Code::refused);
  CHECK_EQ(shard.figures(1)->rows, 0);
}

TEST(a_shard_refuses_pieces_of_the_wrong_length) {
  Shard shard(0);
  CHECK(shard.declare(spec()).ok());
  CHECK(push(shard, {2}, Codec::fp32, 16) == Code::refused);
  CHECK(push(shard, {2}, Codec::fp32, 24) == Code::refused);
  CHECK(push(shard, {2}, Codec::fp32, 20) == Code::ok);
  CHECK(push(shard, {2}, Codec::fp16, 12) == Code::ok);  // 10 bytes, counted in fours
  CHECK(push(shard, {0, 2}, Codec::fp32, 4 * (kPieceFloats + 5)) == Code::ok);
  CHECK(push(shard, {2}, Codec::fp16, 12, PushMode::assign) == Code::refused);
}
