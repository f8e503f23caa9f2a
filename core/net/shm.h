// Memory shared by a client and the servers on its host: a client makes segments (memfd), hands their
// descriptors over a unix socket, and lets servers gather rows straight into them and read gradients
// from them.
//
// A segment is sealed against shrinking and growing before it is shared, and `Segment::adopt` refuses
// one that is not: a peer can therefore never make the other side fault by truncating it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/status.h"
#include "net/fd.h"

namespace shoal {

class Segment {
 public:
  static Result<std::shared_ptr<Segment>> create(uint32_t id, size_t bytes);
  // Maps a descriptor that came from a peer; takes it over. Checks seals and size.
  static Result<std::shared_ptr<Segment>> adopt(uint32_t id, int fd, size_t bytes_max);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  uint32_t id() const { return id_; }  // unique within its client, never 0
  int fd() const { return fd_.get(); }
  std::span<std::byte> bytes() const { return {base_, size_}; }

 private:
  Segment(uint32_t id, Fd fd, std::byte* base, size_t size);
  const uint32_t id_;
  const Fd fd_;
  std::byte* const base_;
  const size_t size_;
};

// A piece of a segment (or of plain memory: segment() is null), given back to its arena when the last
// owner lets go. Keeps the segment mapped for as long as it lives, also after the arena is gone.
class Block {
 public:
  virtual ~Block() = default;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  std::span<std::byte> bytes() const { return bytes_; }  // aligned to 64; may be larger than asked
  const std::shared_ptr<Segment>& segment() const { return segment_; }
  size_t offset() const { return offset_; }  // of bytes() within the segment

 protected:
  explicit Block(std::span<std::byte> bytes) : bytes_(bytes) {}
  Block(std::shared_ptr<Segment> segment, size_t offset, size_t bytes)
      : segment_(std::move(segment)), offset_(offset), bytes_(segment_->bytes().subspan(offset, bytes)) {}

 private:
  const std::shared_ptr<Segment> segment_;
  const size_t offset_ = 0;
  const std::span<std::byte> bytes_;
};

// Hands out blocks. Thread-safe. Blocks are reused warm: a fresh 54 MB buffer costs 20 ms of page
// faults, more than the wire does.
class Arena {
 public:
  virtual ~Arena() = default;
  virtual std::shared_ptr<Block> allocate(size_t bytes) = 0;  // null: the arena's limit is reached
  virtual size_t bytes_mapped() const = 0;
};

// Segments of at least `segment_bytes_min`, `bytes_max` in total.
std::shared_ptr<Arena> make_shared_arena(size_t segment_bytes_min, size_t bytes_max);
// Plain memory with huge pages where large; keeps up to `bytes_kept` of free blocks warm.
std::shared_ptr<Arena> make_heap_arena(size_t bytes_kept);

}  // namespace shoal
