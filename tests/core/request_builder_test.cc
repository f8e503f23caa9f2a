#include "serve/request_builder.h"

#include "check.h"

using namespace shoal;

namespace {

constexpr size_t kMiB = size_t{1} << 20;

RequestBuilder on_one_server(size_t shards) {
  auto placement = std::make_shared<Placement>();
  placement->servers.push_back({.index = 0, .host = "here", .port = 1, .unix_path = ""});
  placement->shards.resize(shards, {.term = 1, .chain = {0}});
  return {std::move(placement), nullptr, make_heap_arena(kMiB)};
}

std::shared_ptr<Request> pull_of(size_t parts, size_t body_bytes) {
  auto request = std::make_shared<Request>();
  request->parts.resize(parts);
  request->body_bytes = body_bytes;
  return request;
}

}  // namespace

TEST(a_frame_is_never_planned_beyond_what_a_server_takes) {
  const RequestBuilder builder = on_one_server(5);
  const std::vector<size_t> bytes = {500 * kMiB, 400 * kMiB, 300 * kMiB, 2000 * kMiB, 100 * kMiB};
  for (const bool pulls : {false, true}) {
    const auto frames = builder.plan(bytes, SIZE_MAX, pulls);
    REQUIRE(frames.size() == 4);
    CHECK(frames[0].shards == std::vector<uint32_t>({0, 1}));
    CHECK(frames[2].shards == std::vector<uint32_t>({3}));  // too large by itself: whoever asked is told
  }
}

TEST(pulls_of_several_tables_travel_together_as_far_as_a_frame_goes) {
  std::vector<std::shared_ptr<Request>> requests;
  for (int i = 0; i < 5; ++i) requests.push_back(pull_of(1, 400));
  requests.push_back(pull_of(kPartsMax, 0));
  const auto frames = RequestBuilder::cut(std::move(requests), 1000);
  REQUIRE(frames.size() == 4);
  CHECK_EQ(frames[0].size(), 2);
  CHECK_EQ(frames[2].size(), 1);
  CHECK_EQ(frames[3].size(), 1);
}
