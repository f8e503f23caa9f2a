#include "serve/client_protocol.h"

#include <new>

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

}  // namespace

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
