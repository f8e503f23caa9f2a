#include "wire/frame.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstdlib>
#include <cstring>

#include "base/crc32c.h"

namespace shoal {
namespace {

static_assert(std::endian::native == std::endian::little, "the wire is little-endian and so are we");

constexpr size_t kReadAhead = 64 * 1024;
// A buffer that one huge frame made is given back after it.
constexpr size_t kBufferKept = 8 * 1024 * 1024;

uint32_t checksum_of(Header header, std::span<const Part> parts) {
  header.checksum = 0;
  const uint32_t crc = crc32c(std::as_bytes(std::span(&header, 1)));
  return crc32c(std::as_bytes(parts), crc);
}

}  // namespace

void seal_head(Header header, std::span<const Part> parts, size_t body_bytes, std::byte* out) {
  assert(parts.size() <= kPartsMax);
  header.part_count = static_cast<uint32_t>(parts.size());
  header.body_bytes = body_bytes;
  header.checksum = checksum_of(header, parts);
  std::memcpy(out, &header, sizeof header);
}

std::vector<std::byte> encode_head(const Header& header, std::span<const Part> parts, size_t body_bytes) {
  std::vector<std::byte> out(sizeof(Header) + parts.size_bytes());
  seal_head(header, parts, body_bytes, out.data());
  if (!parts.empty()) std::memcpy(out.data() + sizeof(Header), parts.data(), parts.size_bytes());
  return out;
}

std::vector<std::byte> small_frame(Kind kind, uint64_t client, uint32_t incarnation,
                                   std::span<const std::byte> body) {
  Header header;
  header.kind = static_cast<uint16_t>(kind);
  header.client = client;
  header.incarnation = incarnation;
  std::vector<std::byte> frame = encode_head(header, {}, body.size());
  frame.insert(frame.end(), body.begin(), body.end());
  return frame;
}

std::optional<std::span<const std::byte>> array_in(std::span<const std::byte> memory, uint32_t at,
                                                   size_t bytes) {
  const size_t offset = size_t{at} * 4;
  if (offset > memory.size() || bytes > memory.size() - offset) return std::nullopt;
  return memory.subspan(offset, bytes);
}

void FrameReader::Free::operator()(std::byte* p) const { std::free(p); }

bool FrameReader::make_room(size_t bytes) {
  const size_t held = end_ - begin_;
  if (capacity_ < bytes || (capacity_ > kBufferKept && bytes <= kBufferKept / 2)) {
    const size_t size = (std::max(bytes, kReadAhead) + 63) / 64 * 64;
    std::unique_ptr<std::byte[], Free> fresh(static_cast<std::byte*>(std::aligned_alloc(64, size)));
    if (fresh == nullptr) return false;
    if (held > 0) std::memcpy(fresh.get(), buffer_.get() + begin_, held);
    buffer_ = std::move(fresh);
    capacity_ = size;
  } else if (begin_ > 0 && held > 0) {
    std::memmove(buffer_.get(), buffer_.get() + begin_, held);
  }
  begin_ = 0;
  end_ = held;
  return true;
}

std::span<std::byte> FrameReader::want() {
  // Frames begin at the start of the buffer, so that their arrays are aligned; what is read ahead of
  // a frame is at most kReadAhead, so moving it there is cheap.
  if (!make_room(std::max(needed_, kReadAhead))) return {};
  const size_t end = std::max(needed_, kReadAhead);
  return {buffer_.get() + end_, end - end_};
}

void FrameReader::commit(size_t bytes) {
  end_ += bytes;
  assert(end_ <= capacity_);
}

Status FrameReader::check_header(const Header& header) const {
  if (header.magic != kMagic) return {Code::refused, "these bytes are not a Shoal frame"};
  if (header.version != kWireVersion) {
    return {Code::refused, "wire version " + std::to_string(header.version) + " is not spoken here, only " +
                               std::to_string(kWireVersion)};
  }
  // A peer that has proved nothing gets no room for parts either.
  const uint32_t parts_max = body_bytes_max_ <= kHandshakeBodyMax ? 0 : kPartsMax;
  if (header.part_count > parts_max) {
    return {Code::refused, "a frame of " + std::to_string(header.part_count) + " parts; at most " +
                               std::to_string(parts_max) + " are allowed here"};
  }
  if (header.body_bytes > body_bytes_max_) {
    return {Code::refused, "a frame with a body of " + std::to_string(header.body_bytes) +
                               " bytes; at most " + std::to_string(body_bytes_max_) + " are allowed here"};
  }
  return {};
}

Result<std::optional<FrameView>> FrameReader::next() {
  needed_ = 0;
  const size_t held = end_ - begin_;
  if (held < sizeof(Header)) return std::optional<FrameView>();
  Header header;
  std::memcpy(&header, buffer_.get() + begin_, sizeof header);
  if (Status status = check_header(header); !status.ok()) return status;
  const size_t head = sizeof(Header) + size_t{header.part_count} * sizeof(Part);
  if (held < head) {
    needed_ = head;
    return std::optional<FrameView>();
  }
  // The parts are read where they lie: the frame must begin at an aligned place.
  if (begin_ % 64 != 0 && !make_room(std::max(head, kReadAhead)))
    return Status{Code::internal, "out of memory for a frame"};
  const auto* parts = reinterpret_cast<const Part*>(buffer_.get() + begin_ + sizeof(Header));
  const std::span<const Part> part_span(parts, header.part_count);
  if (!head_is_good_ && checksum_of(header, part_span) != header.checksum)
    return Status{Code::refused, "a frame's checksum is wrong"};
  head_is_good_ = true;
  needed_ = head + header.body_bytes;
  if (held < needed_) return std::optional<FrameView>();
  FrameView view{header, part_span, {buffer_.get() + begin_ + head, header.body_bytes}};
  begin_ += needed_;
  needed_ = 0;
  head_is_good_ = false;
  return std::optional(view);
}

}  // namespace shoal
