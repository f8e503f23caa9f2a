// The pieces of one dense tensor that lie in one shard. A piece is a row of up to 65,536 floats with its
// optimizer state behind it; it is born by its first write. Not thread-safe; the shard's mutex guards it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "base/grow_array.h"
#include "store/image.h"
#include "store/table_spec.h"
#include "wire/codec.h"

namespace shoal {

class DensePieces {
 public:
  explicit DensePieces(std::shared_ptr<const TableSpec> spec) : spec_(std::move(spec)) {}

  const TableSpec& spec() const { return *spec_; }
  const std::shared_ptr<const TableSpec>& shared_spec() const { return spec_; }
  void set_spec(std::shared_ptr<const TableSpec> spec) { spec_ = std::move(spec); }
  size_t size() const { return pieces_.size(); }
  size_t memory_bytes() const;
  size_t value_floats() const;

  // Writes the piece's values in `codec`; an unborn piece reads as the tensor's initial value.
  void pull(int64_t piece, Codec codec, std::byte* out) const;
  // Each is false when memory is exhausted; the piece is then as it was.
  // Gives birth to it: a push can then not fail. `plain`: one that is in fp32 and not compensated.
  bool prepare(int64_t piece, bool plain);
  bool push(int64_t piece, Codec codec, const std::byte* grad, float lr, uint64_t version);
  // The gradient was made from the values `pulled` (fp32); lambda makes up for what has changed since.
  bool push_compensated(int64_t piece, Codec codec, const std::byte* grad, const std::byte* pulled,
                        float lambda, float lr, uint64_t version);
  bool assign(int64_t piece, const std::byte* value, uint64_t version);
  // Only the first value counts: a piece that was written already stays as it is.
  bool init_once(int64_t piece, const std::byte* value, uint64_t version);
  // Of the piece's last write; 0 before the first.
  uint64_t version(int64_t piece) const;

  // As those of TableRows.
  void begin_image();
  void end_image() { image_.clear(); }
  bool read_image(ImagePage& page);  // one piece at a time
  bool image_broken() const { return image_broken_; }
  bool restore(const ImagePage& page);

 private:
  struct Piece {
    GrowArray memory;  // value, then state
    uint64_t version = 0;

    float* value() { return reinterpret_cast<float*>(memory.data()); }
    const float* value() const { return reinterpret_cast<const float*>(memory.data()); }
  };
  const Piece* find(int64_t piece) const;
  Piece* find_or_make(int64_t piece);
  Piece* find_to_write(int64_t piece);  // its image is kept
  void step(int64_t piece, const float* grad, float lr, uint64_t version);
  size_t all_floats(int64_t piece) const;
  // Of the state, where it has one.
  float* scalar(Piece& at, int64_t piece) const { return at.value() + all_floats(piece) - 1; }

  std::shared_ptr<const TableSpec> spec_;
  std::map<int64_t, Piece> pieces_;
  std::unique_ptr<float[]> decoded_;
  struct Old {
    uint64_t version;
    std::vector<float> memory;
  };
  std::map<int64_t, std::optional<Old>> image_;  // not read yet; nothing: the piece is as it was
  bool image_broken_ = false;
};

}  // namespace shoal
