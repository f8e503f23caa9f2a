#include "wire/frame.h"

#include <cstring>
#include <random>

#include "check.h"
#include "wire_talk.h"

using namespace shoal;

namespace {

constexpr size_t kBodyMax = 1 << 20;

std::vector<Part> some_parts(size_t count) {
  std::vector<Part> parts(count);
  for (size_t i = 0; i < count; ++i) {
    parts[i].shard = static_cast<uint16_t>(i);
    parts[i].version = i * 1000;
  }
  return parts;
}

Bytes some_frame(size_t parts, size_t body_bytes, uint64_t request = 5) {
  Header header;
  header.kind = static_cast<uint16_t>(Kind::pull);
  header.request = request;
  Bytes body(body_bytes);
  for (size_t i = 0; i < body_bytes; ++i) {
    body[i] = static_cast<std::byte>(i * 7 + request);
  }
  return make_frame(header, some_parts(parts), body);
}

void put(FrameReader& reader, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const std::span<std::byte> want = reader.want();
    const size_t count = std::min(want.size(), bytes.size());
    std::memcpy(want.data(), bytes.data(), count);
    reader.commit(count);
    bytes = bytes.subspan(count);
  }
}

bool refuses(const Bytes& bytes, size_t body_max = kBodyMax) {
  FrameReader reader(body_max);
  put(reader, bytes);
  const auto next = reader.next();
  return !next.ok() && next.status().code() == Code::refused;
}

// Whether `view` is some_frame(parts, body_bytes, request), where it should lie.
bool is_frame(const FrameView& view, size_t parts, size_t body_bytes, uint64_t request) {
  const Bytes expected = some_frame(parts, body_bytes, request);
  const size_t head = sizeof(Header) + parts * sizeof(Part);
  return view.header.request == request && view.parts.size() == parts && view.body.size() == body_bytes &&
         std::memcmp(view.parts.data(), expected.data() + sizeof(Header), parts * sizeof(Part)) == 0 &&
         std::memcmp(view.body.data(), expected.data() + head, body_bytes) == 0 &&
         reinterpret_cast<uintptr_t>(view.parts.data()) % 64 == 0 &&
         reinterpret_cast<uintptr_t>(view.body.data()) % 64 == 0;
}

}  // namespace

TEST(a_frame_comes_back_as_it_was) {
  for (const size_t parts : {0u, 1u, 3u, 1000u}) {
    for (const size_t body : {0u, 1u, 63u, 64u, 100'000u}) {
      FrameReader reader(kBodyMax);
      const Bytes frame = some_frame(parts, body);
      Result<std::optional<FrameView>> next = reader.next();
      for (size_t at = 0; at < frame.size();) {
        const std::span<std::byte> want = reader.want();
        const size_t count = std::min(want.size(), frame.size() - at);
        std::memcpy(want.data(), frame.data() + at, count);
        reader.commit(count);
        at += count;
        next = reader.next();
        REQUIRE(next.ok());
        CHECK_EQ(next->has_value(), at == frame.size());
      }
      REQUIRE(next->has_value());
      CHECK(is_frame(**next, parts, body, 5));
    }
  }
}

TEST(a_frame_may_be_cut_at_every_byte) {
  const Bytes frame = some_frame(2, 70);
  for (size_t cut = 0; cut <= frame.size(); ++cut) {
    FrameReader reader(kBodyMax);
    put(reader, std::span(frame).first(cut));
    const auto early = reader.next();
    REQUIRE(early.ok());
    CHECK_EQ(early->has_value(), cut == frame.size());
    put(reader, std::span(frame).subspan(cut));
    const auto late = cut == frame.size() ? early : reader.next();
    REQUIRE(late.ok() && late->has_value());
    CHECK(is_frame(**late, 2, 70, 5));
  }
}

TEST(a_truncated_frame_is_never_handed_out) {
  const Bytes frame = some_frame(3, 200);
  for (size_t size = 0; size < frame.size(); ++size) {
    FrameReader reader(kBodyMax);
    put(reader, std::span(frame).first(size));
    const auto next = reader.next();
    CHECK(next.ok() && !next->has_value());
  }
}

TEST(every_flipped_bit_of_header_and_parts_is_refused_or_waits) {
  const Bytes good = some_frame(2, 64);
  const size_t head = sizeof(Header) + 2 * sizeof(Part);
  for (size_t bit = 0; bit < head * 8; ++bit) {
    Bytes bad = good;
    bad[bit / 8] ^= std::byte{1} << (bit % 8);
    FrameReader reader(kBodyMax);
    put(reader, bad);
    const auto next = reader.next();
    // More parts than before may be announced, and are then waited for; nothing is ever handed out.
    CHECK(!next.ok() || !next->has_value());
    bad.resize(bad.size() + (size_t{kPartsMax} + 2) * sizeof(Part));
    FrameReader again(kBodyMax);
    Result<std::optional<FrameView>> last = std::optional<FrameView>();
    std::span<const std::byte> left = bad;
    while (last.ok() && !*last && !left.empty()) {
      const std::span<std::byte> want = again.want();
      const size_t count = std::min(want.size(), left.size());
      std::memcpy(want.data(), left.data(), count);
      again.commit(count);
      left = left.subspan(count);
      last = again.next();
    }
    CHECK(!last.ok());
  }
}

TEST(what_is_no_frame_is_refused_with_the_reason) {
  Bytes garbage(4096, std::byte{0x41});
  CHECK(refuses(garbage));
  CHECK(refuses(bytes_of("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + std::string(200, ' '))));
  Header header;
  header.version = kWireVersion + 1;
  CHECK(refuses(make_frame(header)));
  header = {};
  header.magic = 0;
  CHECK(refuses(make_frame(header)));
}

TEST(an_oversized_frame_is_refused_before_its_body_comes) {
  Header header;
  const auto sealed = [&header](size_t body) { return encode_head(header, {}, body); };
  CHECK(refuses(sealed(kBodyMax + 1)));
  CHECK(!refuses(sealed(kBodyMax)));
  CHECK(refuses(sealed(SIZE_MAX)));
  CHECK(refuses(sealed(SIZE_MAX - sizeof(Header))));
  header.part_count = kPartsMax + 1;
  Bytes many(sizeof header);
  std::memcpy(many.data(), &header, sizeof header);
  CHECK(refuses(many));
}

TEST(before_the_proof_a_frame_is_small) {
  CHECK(!refuses(some_frame(0, kHandshakeBodyMax), kHandshakeBodyMax));
  CHECK(refuses(some_frame(0, kHandshakeBodyMax + 1), kHandshakeBodyMax));
  CHECK(refuses(some_frame(1, 0), kHandshakeBodyMax));
}

TEST(frames_of_any_size_in_chunks_of_any_size_come_in_order) {
  std::mt19937 random(5);
  for (int run = 0; run < 30; ++run) {
    Bytes stream;
    std::vector<std::pair<size_t, size_t>> sizes;
    for (uint64_t i = 0; i < 40; ++i) {
      const size_t body = random() % 8 == 0 ? random() % 200'000 : random() % 300;
      sizes.emplace_back(random() % 4, body);
      const Bytes frame = some_frame(sizes.back().first, body, i);
      stream.insert(stream.end(), frame.begin(), frame.end());
    }
    FrameReader reader(kBodyMax);
    std::span<const std::byte> left = stream;
    uint64_t seen = 0;
    while (!left.empty()) {
      const std::span<std::byte> want = reader.want();
      const size_t count = std::min({want.size(), left.size(), size_t{1} + random() % 5000});
      std::memcpy(want.data(), left.data(), count);
      reader.commit(count);
      left = left.subspan(count);
      for (auto next = reader.next(); next.ok() && *next; next = reader.next(), ++seen) {
        CHECK(is_frame(**next, sizes[seen].first, sizes[seen].second, seen));
      }
    }
    CHECK_EQ(seen, sizes.size());
  }
}

TEST(a_huge_frame_between_small_ones_costs_nobody) {
  const size_t huge = 20 * kBodyMax;
  FrameReader reader(huge);
  uint64_t seen = 0;
  const size_t sizes[] = {10, huge, 100, huge / 2, 0};
  for (uint64_t i = 0; i < 5; ++i) {
    const Bytes frame = some_frame(1, sizes[i], i);
    std::span<const std::byte> left = frame;
    while (!left.empty()) {
      const std::span<std::byte> want = reader.want();
      const size_t count = std::min(want.size(), left.size());
      std::memcpy(want.data(), left.data(), count);
      reader.commit(count);
      left = left.subspan(count);
      for (auto next = reader.next(); next.ok() && *next; next = reader.next()) {
        CHECK(is_frame(**next, 1, sizes[seen], seen));
        ++seen;
      }
    }
  }
  CHECK_EQ(seen, 5);
}

TEST(an_array_must_lie_in_its_memory) {
  const Bytes memory(100);
  CHECK(array_in(memory, 0, 100).has_value());
  CHECK(array_in(memory, 25, 0).has_value());
  CHECK(!array_in(memory, 0, 101).has_value());
  CHECK(!array_in(memory, 25, 1).has_value());
  CHECK(!array_in(memory, 26, 0).has_value());
  CHECK(!array_in(memory, UINT32_MAX, 4).has_value());
  CHECK(!array_in(memory, 1, SIZE_MAX).has_value());
  CHECK(!array_in({}, 0, 1).has_value());
}
