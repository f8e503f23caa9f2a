// Memory shared by a client and the servers on its host: a client makes segments (memfd), hands their
// descriptors over a unix socket, and lets servers gather rows straight into them and read gradients
// from them.
//
// A segment is sealed against shrinking and growing before it is shared, and `Segment::adopt` refuses
// one that is not: a peer can therefore never make the other side fault by truncating it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/status.h"

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
  int fd() const { return fd_; }
  std::span<std::byte> bytes() const { return {base_, size_}; }

 private:
  Segment(uint32_t id, int fd, std::byte* base, size_t size);
  const uint32_t id_;
  const int fd_;
  std::byte* const base_;
  const size_t size_;
};

// A piece of a segment (or of plain memory: segment() is null), given back to its arena when the last
// owner lets go. Keeps the segment mapped for as long as it lives, also after the arena is gone.
class Block {
 public:
  virtual ~Block() = default;
  virtual std::span<std::byte> bytes() const = 0;  // aligned to 64; may be larger than asked
  virtual const Segment* segment() const = 0;
  virtual size_t offset() const = 0;  // of bytes() within the segment
};

// Hands out blocks. Thread-safe. Blocks are reused warm: a fresh 54 MB buffer costs 20 ms of page
// faults, more than the wire does.
class Arena {
 public:
  virtual ~Arena() = default;
  virtual std::shared_ptr<Block> allocate(size_t bytes) = 0;  // null: the arena's limit is reached
  // Blocks of the segments that exist now are never handed out again; segments are unmapped when their
  // last block dies. For connections that broke while a server might still be writing into a block.
  virtual void retire() = 0;
  virtual size_t bytes_mapped() const = 0;
};

// Segments of at least `segment_bytes_min`, `bytes_max` in total.
std::shared_ptr<Arena> make_shared_arena(size_t segment_bytes_min, size_t bytes_max);
// Plain memory with huge pages where large; keeps up to `bytes_kept` of free blocks warm.
std::shared_ptr<Arena> make_heap_arena(size_t bytes_kept);

}  // namespace shoal
