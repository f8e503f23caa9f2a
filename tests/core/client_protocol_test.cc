#include "serve/client_protocol.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "check.h"
#include "failing_memory.h"

using namespace shoal;

namespace {

// Shards 0 and 1 on servers 0 and 1; from version 2 on the second server is gone.
Placement placement_of(uint32_t version) {
  Placement placement;
  placement.version = version;
  placement.servers.push_back({.index = 0, .host = "here", .port = 1, .unix_path = ""});
  placement.servers.push_back({.index = 1, .host = "there", .port = 1, .unix_path = ""});
  if (version > 1) placement.servers[1].port = 0;
  placement.shards.push_back({.term = version, .chain = {0}});
  placement.shards.push_back({.term = version, .chain = {version == 1 ? 1u : 0u}});
  return placement;
}

std::shared_ptr<Request> request_of(Kind kind, const std::shared_ptr<Operation>& operation) {
  auto request = std::make_shared<Request>();
  request->operation = operation;
  request->header.kind = static_cast<uint16_t>(kind);
  request->parts.resize(1);
  request->parts[0].shard = 1;
  return request;
}

// How often `work` must be tried while its first `enough` allocations succeed, and then all of them.
template <typename Work>
int tries(int64_t enough, Work work) {
  allocations_left = enough;
  try {
    work();
    allocations_left = -1;
    return 1;
  } catch (const std::bad_alloc&) {
    allocations_left = -1;
    work();
    return 2;
  }
}

constexpr uint32_t kDim = 4;

// What a push says, as its server reads it: keys, and the first value of the row or piece of each. Empty
// where it names memory that does not travel.
std::vector<std::pair<int64_t, float>> rows_in_body(const Request& push) {
  std::vector<std::byte> body;
  for (const auto piece : push.body) body.insert(body.end(), piece.begin(), piece.end());
  std::vector<std::pair<int64_t, float>> rows;
  for (const Part& part : push.parts) {
    const auto keys = array_in(body, part.keys_at, 8 * part.count);
    const size_t row_bytes = part.values_words != 0 ? 4 * part.values_words / part.count : 4 * kDim;
    for (const uint32_t at : {part.values_at, part.pulled_at}) {
      if (at == part.pulled_at && part.dc_lambda == 0) continue;
      const auto values = array_in(body, at, row_bytes * part.count);
      if (part.keys_segment != 0 || part.values_segment != 0 || !keys || !values) return {};
      for (uint32_t i = 0; i < part.count; ++i) {
        auto& [key, value] = rows.emplace_back();
        std::memcpy(&key, keys->data() + 8 * i, sizeof key);
        std::memcpy(&value, values->data() + row_bytes * i, sizeof value);
      }
    }
  }
  return rows;
}

}  // namespace

// Server 1 reaches our memory and server 0 does not; what server 1 had goes to server 0.
TEST(what_lies_in_shared_memory_moves_to_a_server_that_does_not_reach_it) {
  for (const bool before_it_is_sent : {false, true}) {
    RequestBuilder builder{std::make_shared<Placement>(placement_of(1)), make_shared_arena(1 << 20, 1 << 20),
                           make_heap_arena(4096)};
    ClientProtocol protocol(1, 1, builder);
    protocol.set_shares_memory(1);
    const auto spec = std::make_shared<TableSpec>();
    spec->dim = kDim;
    std::vector<int64_t> keys(64);
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i);
    std::vector<float> values(kDim * keys.size());
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i / kDim);
    const auto grouped = builder.group(*spec, keys, true);
    const RequestBuilder::Frame frame{1, {1}};
    Merger merger;

    // Joined: a table's rows in shared memory and in the body, and a tensor with the values that it was
    // pulled with. And a pull.
    const auto pushed = std::make_shared<Operation>();
    REQUIRE(protocol.machine().begin(*pushed, true));
    const PushItem item{.table = 0, .values = values, .lr = 1, .spec = spec};
    const auto tensor = std::make_shared<TableSpec>();
    tensor->dense = true;
    tensor->dim = kPieceFloats;
    const std::vector<float> ones(kPieceFloats, 1.0f), twos(kPieceFloats, 2.0f);
    PushItem dense{.table = 1, .values = ones, .lr = 1, .spec = tensor};
    dense.pulled = twos;
    dense.dc_lambda = 0.5f;
    const uint32_t home = shard_of_key(*tensor, 0, 2);
    auto push = RequestBuilder::join({builder.push(*grouped.split, frame, item, {}, true, merger, nullptr),
                                      builder.push(*grouped.split, frame, item, {}, false, merger, nullptr),
                                      builder.push_pieces(dense, 1, home, {}, true)});
    REQUIRE(RequestBuilder::needs_shared_memory(*push));
    for (Part& part : push->parts) part.shard = 1;
    push->operation = pushed;
    const auto pulled = std::make_shared<PullOperation>();
    pulled->spec = spec;
    pulled->rows = keys.size();
    pulled->row_floats = kDim;
    pulled->block = builder.allocate(4 * values.size(), true);
    REQUIRE(protocol.machine().begin(*pulled, false));
    const auto pull = builder.pull(pulled, grouped, frame, true, merger);
    REQUIRE(pull != nullptr && RequestBuilder::needs_shared_memory(*pull));

    if (before_it_is_sent) REQUIRE(protocol.set_placement(placement_of(2)));
    protocol.submit(push);
    protocol.submit(pull);
    if (!before_it_is_sent) {
      const auto to_one = protocol.machine().next_to_send(1);
      REQUIRE(to_one != nullptr && RequestBuilder::needs_shared_memory(*to_one));
      REQUIRE(protocol.set_placement(placement_of(2)));
    }
    protocol.send_homeless();
    CHECK(!protocol.homeless());
    const auto sent = protocol.machine().next_to_send(0);
    REQUIRE(sent != nullptr);
    const auto rows = rows_in_body(*sent);
    size_t of_the_table = 0;
    for (const auto& [key, value] : rows)
      of_the_table += shard_of_key(*spec, key, 2) == 1 && value == float(key);
    CHECK_EQ(of_the_table, 2 * grouped.split->count(1));
    CHECK_EQ(rows.size(), of_the_table + 2);
    for (const float value : {1.0f, 2.0f})  // of the tensor's only piece
      CHECK_EQ(std::count(rows.begin(), rows.end(), std::pair(int64_t{0}, value)), 1);
    CHECK(protocol.machine().next_to_send(0) == nullptr);
    const auto stray = protocol.take_stray([](const auto&) { return true; });
    CHECK(stray != nullptr && stray->operation == pulled);  // to be made anew, by sockets
  }
}

// Wherever it does, everything that was open is sent to where its shard is now, once.
TEST(nothing_is_lost_or_doubled_where_memory_runs_out_as_shards_move) {
  for (int64_t enough = 0, failed = 1; failed > 0; ++enough) {
    RequestBuilder builder{std::make_shared<Placement>(placement_of(1)), nullptr, make_heap_arena(4096)};
    ClientProtocol protocol(1, 1, builder);
    std::vector<std::shared_ptr<Operation>> operations;
    for (const Kind kind : {Kind::push, Kind::pull, Kind::push}) {
      operations.push_back(std::make_shared<Operation>());
      REQUIRE(protocol.machine().begin(*operations.back(), kind == Kind::push));
      protocol.submit(request_of(kind, operations.back()));
      protocol.machine().seal(*operations.back());
    }
    failed = tries(enough, [&] { protocol.set_placement(placement_of(2)); }) - 1;
    CHECK(protocol.homeless());
    failed += tries(enough, [&] { protocol.send_homeless(); }) - 1;
    CHECK(protocol.machine().next_to_send(1) == nullptr);
    for (const auto& operation : operations) {
      const auto request = protocol.machine().next_to_send(0);
      REQUIRE(request != nullptr && request->operation == operation);
      protocol.machine().answered(0, request->header.request, {});
      CHECK(operation->done());
    }
    CHECK(protocol.machine().next_to_send(0) == nullptr);
  }
}
