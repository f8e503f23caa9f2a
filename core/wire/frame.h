// The one frame format, on every lane: header, parts (descriptors), body. All integers little-endian.
//
//   header 128 bytes | part_count x 64 bytes | body
//
// An array of a part lies in the body (segment 0) or in a shared-memory segment, at an offset counted in
// units of four bytes. Nothing read from the wire is trusted: `FrameReader` checks magic, version,
// lengths and the checksum of header and parts before it makes room for a body, and `array_in` checks
// every array against the memory it claims to lie in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/status.h"

namespace shoal {

inline constexpr uint32_t kMagic = 0x4c414f48;  // "HOAL"
inline constexpr uint16_t kWireVersion = 2;
inline constexpr uint32_t kPartsMax = 16384;
inline constexpr size_t kBodyBytesMax = size_t{1} << 30;
// Of a client's push: its head may send tables' settings along, in a part more for each shard.
inline constexpr uint32_t kPushPartsMax = kPartsMax / 2;
inline constexpr size_t kPushBodyBytesMax = kBodyBytesMax - (size_t{16} << 20);
inline constexpr size_t kHandshakeBodyMax = 256;  // bodies before the token is proved

enum class Kind : uint16_t {
  hello = 1,
  challenge = 2,
  proof = 3,
  welcome = 4,
  refuse = 5,  // body: why; the connection ends
  declare = 10,
  push = 12,
  pull = 14,
  scan = 16,
  figures = 18,
  goodbye = 19,       // this client sends no more: forget it. Not answered
  segment = 20,       // a shared-memory descriptor travels with the first byte. Not answered
  segment_gone = 21,  // the client has let go of the segment `request`: unmap it. Not answered
  sync = 22,          // a question to the sync shard; the answer may wait for other workers
  commit = 23,        // body: the commit that every shard of this server is to apply
  norm = 24,          // body: a commit. Answered with the squared norm of this server's part of its sum
  // Between servers of a chain. Parts name the shards, terms and entries of their logs (`log_entry`).
  replicate_push = 25,    // a push as the head took it; `origin` is whose
  replicate_commit = 26,  // body: the commit
  replicate_sync = 27,    // body: the question; `step`: the time, as bits of a double
  image = 28,             // of one shard: its head (table 0), a page of rows, or the end (mode 1)
  reply = 32,             // to any of the above; `request` names which
};

enum Flags : uint32_t {
  kApply = 0,             // a push takes effect at once
  kStage = 1 << 0,        // a push waits for its round's commit
  kByStaleness = 1 << 1,  // its lr is divided by its staleness
  kSettings = 1 << 2,  // a commit between servers: tables' settings follow it, made with for the first time
};

struct Header {
  uint32_t magic = kMagic;
  uint16_t version = kWireVersion;
  uint16_t kind = 0;
  uint32_t flags = 0;
  uint32_t name_space = 0;
  uint64_t client = 0;
  uint32_t incarnation = 0;
  uint32_t member_term = 0;
  uint64_t request = 0;  // chosen by the client, echoed by the reply
  uint64_t seq = 0;      // pushes: with client and incarnation, the name of the push
  uint64_t low = 0;      // all pushes below are acknowledged everywhere
  uint64_t step = 0;
  uint64_t round = 0;
  uint64_t body_bytes = 0;
  uint32_t cut = 0;
  uint32_t part_count = 0;
  uint16_t code = 0;    // replies: shoal::Code; the body is its message where not ok
  uint16_t last = 0;    // replies: 1 on the last frame that answers the request
  uint32_t rank = 0;    // staged pushes: of the worker
  uint64_t origin = 0;  // what a server sends on: the client that it came from, and its numbers
  uint64_t origin_seq = 0;
  uint64_t origin_low = 0;
  uint32_t origin_incarnation = 0;
  uint32_t checksum = 0;  // CRC-32C of header (this field 0) and parts
};
static_assert(sizeof(Header) == 128);

struct Part {
  uint16_t shard = 0;
  uint8_t codec = 0;
  uint8_t mode = 0;  // pushes: PushMode; replies to pushes: 1 = was a duplicate; pulls: kAnyCopy, or 0
  uint32_t table = 0;
  uint32_t term = 0;
  uint32_t count = 0;      // keys
  float lr = 0.0f;         // NaN: the table's own
  uint32_t samples = 0;    // pulls through a socket: number of the first row within the request. Replies to
                           // pushes: 1 + entries that the servers behind may not have; 0: they have this one
  uint64_t version = 0;    // the shard's: replies: now; pushes: when it was last pulled. scans: the cursor
  uint32_t keys_at = 0;    // replies to pulls: number of the first row, as the request counts them
  uint32_t values_at = 0;  // pushes: the rows. pulls: where the rows shall go, if in a segment
  uint32_t positions_at = 0;   // pulls into a segment: row of each key, u32, beside the keys
  uint32_t positions_end = 0;  // rows that there is room for
  uint16_t keys_segment = 0;
  uint16_t values_segment = 0;
  uint32_t values_words = 0;  // pushes of dense pieces: words of four bytes that the values take
  float dc_lambda = 0.0f;     // pushes of dense pieces: delay compensation; 0: none
  uint32_t pulled_at = 0;     // where it is not 0: the values that the gradient was made from, beside it
};
static_assert(sizeof(Part) == 64);

// Any server of the chain may answer: no acknowledged push is missing, others may show.
inline constexpr uint8_t kAnyCopy = 1;

// Frames between servers: the number in the shard's log, kept where pulls have their positions.
inline uint64_t log_entry(const Part& part) { return uint64_t{part.positions_end} << 32 | part.positions_at; }
inline void set_log_entry(Part& part, uint64_t entry) {
  part.positions_at = static_cast<uint32_t>(entry);
  part.positions_end = static_cast<uint32_t>(entry >> 32);
}

// A complete frame, as a view of the bytes it came in.
struct FrameView {
  Header header;
  std::span<const Part> parts;
  std::span<const std::byte> body;
};

// Writes `header` to `out` (128 bytes) with lengths and checksum filled in; `parts` follow it on the wire.
void seal_head(Header header, std::span<const Part> parts, size_t body_bytes, std::byte* out);
// Header and parts as bytes, sealed. The body follows on the wire.
std::vector<std::byte> encode_head(const Header& header, std::span<const Part> parts, size_t body_bytes);

// A frame without parts.
std::vector<std::byte> small_frame(Kind kind, uint64_t client, uint32_t incarnation,
                                   std::span<const std::byte> body);

// The bytes [at * 4, at * 4 + bytes) of `memory`, or nothing where they do not lie in it.
std::optional<std::span<const std::byte>> array_in(std::span<const std::byte> memory, uint32_t at,
                                                   size_t bytes);

// Cuts a byte stream into frames without doing I/O: read into `want()`, tell `commit`, take frames
// from `next` until there are none. A view lives until the next call of `want` or `next`.
class FrameReader {
 public:
  explicit FrameReader(size_t body_bytes_max) : body_bytes_max_(body_bytes_max) {}

  void set_body_bytes_max(size_t bytes) { body_bytes_max_ = bytes; }
  std::span<std::byte> want();
  void commit(size_t bytes);
  // A frame, nothing yet, or why the peer must be refused. After a refusal the reader is finished.
  Result<std::optional<FrameView>> next();

 private:
  struct Free {
    void operator()(std::byte* p) const;
  };
  bool make_room(size_t bytes);
  Status check_header(const Header& header) const;

  size_t body_bytes_max_;
  std::unique_ptr<std::byte[], Free> buffer_;  // aligned to 64
  size_t capacity_ = 0;
  size_t begin_ = 0;           // of the first byte not yet handed out
  size_t end_ = 0;             // of the bytes read
  size_t needed_ = 0;          // of the frame that begins at begin_, where its header is known
  bool head_is_good_ = false;  // that frame's header and parts were checked: once is enough
};

}  // namespace shoal
