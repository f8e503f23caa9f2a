// The rows of one table in one shard: value and optimizer state in one slot, with frequency, last step,
// version and the scalar of the state beside it. A row is born by its first push or assign; a pull stores
// nothing and reads an absent key as its initial value. Not thread-safe; the shard's mutex guards it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/grow_array.h"
#include "store/image.h"
#include "store/index.h"
#include "store/table_spec.h"
#include "wire/codec.h"

namespace shoal {

// Where pulled rows go: row i to `out + positions[i] * stride`, or one after the other without positions.
struct PullTarget {
  std::byte* out = nullptr;
  const uint32_t* positions = nullptr;
  uint32_t positions_end = 0;  // positions come from a peer: each is checked against this
  Codec codec = Codec::fp32;
  bool stream = false;    // the whole result is larger than the caches: write past them
  bool in_place = false;  // dense tensors: `out` is the whole tensor, a piece goes to its place in it
};

struct ScanPage {
  std::vector<int64_t> keys;
  std::vector<float> values;
  std::optional<uint64_t> next;
};

class TableRows {
 public:
  explicit TableRows(std::shared_ptr<const TableSpec> spec);

  const TableSpec& spec() const { return *spec_; }
  const std::shared_ptr<const TableSpec>& shared_spec() const { return spec_; }
  void set_spec(std::shared_ptr<const TableSpec> spec) { spec_ = std::move(spec); }  // same layout
  size_t size() const { return index_.size(); }
  size_t memory_bytes() const;
  size_t value_floats() const { return size() * dim_; }

  // False when a position is out of range (nothing outside the target is ever written).
  bool pull(std::span<const int64_t> keys, const PullTarget& target) const;

  // Steps each key's row by its gradient, in order. `version` and `step` are noted with each row.
  // False when memory is exhausted; then no gradient was applied.
  bool push(std::span<const int64_t> keys, Codec codec, const std::byte* grads, float lr, uint64_t version,
            uint64_t step);

  // Sets the rows' values; optimizer state of a row that exists stays, a new row's is fresh.
  bool assign(std::span<const int64_t> keys, const std::byte* values, uint64_t version, uint64_t step);

  // Gives birth to the rows that are absent: a push or assign of them in `codec` can then not fail. False
  // when memory is exhausted; rows that were born by then stay, with their initial values.
  bool prepare(std::span<const int64_t> keys, Codec codec);
  // `push` of the keys that were prepared last, with nothing in between: they are not looked up again.
  void push_prepared(size_t keys, Codec codec, const std::byte* grads, float lr, uint64_t version,
                     uint64_t step);
  void trim();  // gives back the scratch of an exceptional push

  ScanPage scan(uint64_t cursor, size_t rows_max) const;

  // The table as it is now, to be read until there is nothing more; another takes its place.
  void begin_image();
  void end_image() { image_.reset(); }
  // Appends about `rows_max` rows. False: that was all.
  bool read_image(size_t rows_max, ImagePage& page);
  // Memory for a copy ran out: the image is not whole, and must not be used.
  bool image_broken() const { return image_ != nullptr && image_->broken; }
  // Makes the page's rows what they were. False: out of memory, or the page is of another layout.
  bool restore(const ImagePage& page);

 private:
  void make_room_by(const ImagePage& first);
  using Meta = RowMeta;
  struct Image {
    uint64_t cursor = 0;                           // of the index
    std::vector<bool> kept;                        // by slot: was read, or is copied aside
    std::unordered_map<uint32_t, size_t> aside{};  // where in the two below
    std::vector<float> rows{};
    std::vector<Meta> metas{};
    bool broken = false;
  };

  float* row(uint32_t slot) { return reinterpret_cast<float*>(rows_.data() + size_t{slot} * stride_); }
  const float* row(uint32_t slot) const {
    return reinterpret_cast<const float*>(rows_.data() + size_t{slot} * stride_);
  }
  // Metas lie close together, each with the scalar of the state behind it, and so at multiples of four only.
  std::byte* meta_at(uint32_t slot) { return meta_.data() + size_t{slot} * meta_bytes_; }
  float* scalar(uint32_t slot) { return reinterpret_cast<float*>(meta_at(slot) + sizeof(Meta)); }
  Meta meta(uint32_t slot);
  void set_meta(uint32_t slot, const Meta& meta);

  // Fills slots_ with the slot of each key, giving birth to those absent. False: out of memory.
  bool resolve(std::span<const int64_t> keys);
  bool birth(int64_t key, uint64_t hash, uint32_t& slot);
  void touch(uint32_t slot, uint64_t version, uint64_t step);
  size_t row_floats() const { return slot_floats_ + scalars_; }  // as an image has them, the scalar last
  void copy_row(uint32_t slot, std::vector<float>& to);
  void keep(size_t count) noexcept;  // what the first of slots_ are now, for the image

  std::shared_ptr<const TableSpec> spec_;
  const uint32_t dim_;
  const uint32_t scalars_;    // of the state of a row: 0 or 1
  const size_t slot_floats_;  // without it
  const size_t stride_;       // bytes from row to row
  const size_t meta_bytes_;   // and from meta to meta
  Index index_;
  GrowArray rows_;
  GrowArray meta_;
  std::vector<uint32_t> slots_;  // scratch of push and assign, kept warm
  std::vector<float> decoded_;   // scratch for encoded gradients
  std::unique_ptr<Image> image_;
};

}  // namespace shoal
