#include "store/table_rows.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <cstdint>
#include <cstring>

#include "base/copy.h"
#include "base/hash.h"

namespace shoal {
namespace {

constexpr size_t kBatch = 128;          // rows handed to an optimizer at once
constexpr size_t kBatchFloats = 65536;  // of them, at most
constexpr size_t kScratchKept = 1 << 20;

// A row begins on a cache line, or (below 64 bytes) never straddles one.
size_t stride_of(size_t bytes) {
  return bytes >= 64 ? round_up(bytes, 64) : std::bit_ceil(std::max<size_t>(bytes, 4));
}

size_t grown(size_t capacity, size_t needed) { return std::max(needed, capacity + capacity / 4); }

size_t batch_rows(uint32_t dim) { return std::clamp<size_t>(kBatchFloats / dim, 1, kBatch); }

uint64_t hash_of(int64_t key) { return mix64(static_cast<uint64_t>(key)); }

}  // namespace

TableRows::TableRows(std::shared_ptr<const TableSpec> spec)
    : spec_(std::move(spec)),
      dim_(static_cast<uint32_t>(spec_->dim)),
      scalars_(state_scalars(spec_->optimizer)),
      slot_floats_(spec_->dim + state_floats(spec_->optimizer, dim_) - scalars_),
      stride_(stride_of(4 * slot_floats_)),
      meta_bytes_(sizeof(Meta) + 4 * scalars_) {
  assert(!spec_->dense);
}

TableRows::Meta TableRows::meta(uint32_t slot) {
  Meta meta;
  std::memcpy(&meta, meta_at(slot), sizeof meta);
  return meta;
}

void TableRows::set_meta(uint32_t slot, const Meta& meta) { std::memcpy(meta_at(slot), &meta, sizeof meta); }

void TableRows::copy_row(uint32_t slot, std::vector<float>& to) {
  to.insert(to.end(), row(slot), row(slot) + slot_floats_);
  to.insert(to.end(), scalar(slot), scalar(slot) + scalars_);
}

size_t TableRows::memory_bytes() const { return index_.memory_bytes() + rows_.capacity() + meta_.capacity(); }

// A pipeline of three stages, so that no key waits for memory: the index line of key i + 2 * kAhead is
// asked for, the row of key i + kAhead is looked up and asked for, and the row of key i is copied.
bool TableRows::pull(std::span<const int64_t> keys, const PullTarget& target) const {
  constexpr size_t kAhead = 12;
  constexpr size_t kRing = 32;  // a power of two above 2 * kAhead
  const size_t row_bytes = encoded_bytes(target.codec, dim_);
  const bool plain = target.codec == Codec::fp32;
  std::vector<float> fresh;  // of an absent key
  std::array<uint64_t, kRing> hashes;
  std::array<const float*, kRing> rows;
  for (size_t step = 0; step < keys.size() + 2 * kAhead; ++step) {
    if (step < keys.size()) {
      hashes[step % kRing] = hash_of(keys[step]);
      index_.prefetch(hashes[step % kRing]);
    }
    if (const size_t i = step - kAhead; step >= kAhead && i < keys.size()) {
      const uint32_t slot = index_.find(keys[i], hashes[i % kRing]);
      rows[i % kRing] = slot == Index::kAbsent ? nullptr : row(slot);
      prefetch_row(rows[i % kRing], slot == Index::kAbsent ? 0 : 4 * dim_);
    }
    if (step < 2 * kAhead) continue;
    const size_t i = step - 2 * kAhead;
    uint32_t position = static_cast<uint32_t>(i);
    if (target.positions != nullptr) {
      // Read once: the array may lie in memory that a peer can still write to.
      position = *static_cast<const volatile uint32_t*>(target.positions + i);
      if (position >= target.positions_end) return false;
    }
    const float* source = rows[i % kRing];
    if (source == nullptr) {
      fresh.resize(dim_);
      init_row(spec_->init, keys[i], fresh.data(), dim_);
      source = fresh.data();
    }
    std::byte* out = target.out + size_t{position} * row_bytes;
    if (plain)
      copy_floats(reinterpret_cast<float*>(out), source, dim_, target.stream);
    else
      encode_rows(target.codec, source, 1, dim_, out);
  }
  if (target.stream) finish_streaming();
  return true;
}

bool TableRows::birth(int64_t key, uint64_t hash, uint32_t& slot) {
  const size_t next = index_.size();
  if (next >= Index::kAbsent) return false;
  if ((next + 1) * stride_ > rows_.capacity() &&
      !rows_.reserve(grown(rows_.capacity(), (next + 1) * stride_))) {
    return false;
  }
  if ((next + 1) * meta_bytes_ > meta_.capacity() &&
      !meta_.reserve(grown(meta_.capacity(), (next + 1) * meta_bytes_))) {
    return false;
  }
  slot = static_cast<uint32_t>(next);
  if (!index_.insert(key, hash, slot)) return false;
  init_row(spec_->init, key, row(slot), dim_);
  init_state(spec_->optimizer, row(slot) + dim_, scalar(slot), dim_);
  set_meta(slot, {});
  return true;
}

bool TableRows::resolve(std::span<const int64_t> keys) {
  constexpr size_t kAhead = 16;         // keys between asking for a line of the index and reading it
  constexpr size_t kRing = 2 * kAhead;  // a power of two
  if (slots_.size() < keys.size()) slots_.resize(keys.size());
  std::array<uint64_t, kRing> hashes;
  // Read once: a peer may still write to them, and key and hash must agree.
  std::array<int64_t, kRing> ring;
  for (size_t step = 0; step < keys.size() + kAhead; ++step) {
    if (step < keys.size()) {
      std::memcpy(&ring[step % kRing], &keys[step], sizeof(int64_t));
      hashes[step % kRing] = hash_of(ring[step % kRing]);
      index_.prefetch(hashes[step % kRing]);
    }
    if (step < kAhead) continue;
    const size_t i = step - kAhead;
    const uint64_t hash = hashes[i % kRing];
    uint32_t& slot = slots_[i];
    slot = index_.find(ring[i % kRing], hash);
    if (slot == Index::kAbsent && !birth(ring[i % kRing], hash, slot)) return false;
  }
  if (image_ != nullptr) keep(keys.size());
  return true;
}

bool TableRows::prepare(std::span<const int64_t> keys, Codec codec) {
  if (codec != Codec::fp32 && decoded_.empty()) decoded_.resize(batch_rows(dim_) * dim_);
  return resolve(keys);
}

void TableRows::trim() {
  if (slots_.size() > kScratchKept) slots_ = {};
}

void TableRows::touch(uint32_t slot, uint64_t version, uint64_t step) {
  Meta m = meta(slot);
  m.version = version;
  m.frequency += m.frequency != 0xffffffffu ? 1 : 0;
  m.last_step = static_cast<uint32_t>(std::min<uint64_t>(step, 0xffffffffu));
  set_meta(slot, m);
}

bool TableRows::push(std::span<const int64_t> keys, Codec codec, const std::byte* grads, float lr,
                     uint64_t version, uint64_t step) {
  // Births first: they may run out of memory, and a push is applied wholly or not at all.
  if (!prepare(keys, codec)) return false;
  push_prepared(keys.size(), codec, grads, lr, version, step);
  return true;
}

void TableRows::push_prepared(size_t keys, Codec codec, const std::byte* grads, float lr, uint64_t version,
                              uint64_t step) {
  const size_t grad_bytes = encoded_bytes(codec, dim_);
  const size_t batch = batch_rows(dim_);
  std::array<float*, kBatch> rows;
  std::array<float*, kBatch> scalars;
  for (size_t first = 0; first < keys; first += batch) {
    const size_t count = std::min(batch, keys - first);
    for (size_t i = 0; i < count; ++i) {
      rows[i] = row(slots_[first + i]);
      scalars[i] = scalar(slots_[first + i]);
      __builtin_prefetch(meta_at(slots_[first + i]), 1);
      if (scalars_ != 0) __builtin_prefetch(scalars[i], 1);  // perhaps on the next line
    }
    const std::byte* encoded = grads + first * grad_bytes;
    const float* plain = reinterpret_cast<const float*>(encoded);
    if (codec != Codec::fp32) {
      decode_rows(codec, encoded, count, dim_, decoded_.data());
      plain = decoded_.data();
    }
    update_rows(spec_->optimizer, lr, std::span<float* const>(rows.data(), count), scalars.data(), plain,
                dim_);
    for (size_t i = 0; i < count; ++i) touch(slots_[first + i], version, step);
  }
}

bool TableRows::assign(std::span<const int64_t> keys, const std::byte* values, uint64_t version,
                       uint64_t step) {
  if (!resolve(keys)) return false;
  const size_t bytes = size_t{4} * dim_;
  for (size_t i = 0; i < keys.size(); ++i) {
    std::memcpy(row(slots_[i]), values + i * bytes, bytes);
    touch(slots_[i], version, step);
  }
  return true;
}

ScanPage TableRows::scan(uint64_t cursor, size_t rows_max) const {
  ScanPage page;
  std::vector<std::pair<int64_t, uint32_t>> found;
  page.next = index_.scan(cursor, rows_max, found);
  page.keys.reserve(found.size());
  page.values.resize(found.size() * dim_);
  for (size_t i = 0; i < found.size(); ++i) {
    page.keys.push_back(found[i].first);
    std::memcpy(page.values.data() + i * dim_, row(found[i].second), size_t{4} * dim_);
  }
  return page;
}

void TableRows::begin_image() { image_ = std::make_unique<Image>(Image{.kept = std::vector<bool>(size())}); }

void TableRows::keep(size_t count) noexcept {
  try {
    for (size_t i = 0; i < count && !image_->broken; ++i) {
      const uint32_t slot = slots_[i];
      if (slot >= image_->kept.size() || image_->kept[slot]) continue;
      copy_row(slot, image_->rows);
      image_->metas.push_back(meta(slot));
      image_->aside.emplace(slot, image_->metas.size() - 1);
      image_->kept[slot] = true;
    }
  } catch (const std::bad_alloc&) {  // training goes on; the image is what can be made again
    *image_ = Image{.kept = {}, .broken = true};
  }
}

bool TableRows::read_image(size_t rows_max, ImagePage& page) {
  const size_t floats = row_floats();
  std::vector<std::pair<int64_t, uint32_t>> found;
  const std::optional<uint64_t> next = index_.scan(image_->cursor, rows_max, found);
  for (const auto& [key, slot] : found) {
    if (slot >= image_->kept.size()) continue;  // born later
    const auto copy = image_->aside.find(slot);
    const bool written = copy != image_->aside.end();
    page.keys.push_back(key);
    page.metas.push_back(written ? image_->metas[copy->second] : meta(slot));
    if (written) {
      const float* from = image_->rows.data() + copy->second * floats;
      page.rows.insert(page.rows.end(), from, from + floats);
    } else {
      copy_row(slot, page.rows);
    }
    image_->kept[slot] = true;
  }
  image_->cursor = next.value_or(0);
  return next.has_value();
}

// Pages come in order of hashes: by how far the first one reaches, all of them together hold so many rows.
void TableRows::make_room_by(const ImagePage& first) {
  constexpr size_t kTellingRows = 256;
  if (index_.size() != 0 || first.keys.size() < kTellingRows) return;
  uint32_t last = 0;
  for (const int64_t key : first.keys) last = std::max(last, static_cast<uint32_t>(hash_of(key)));
  const double share = (static_cast<double>(last) + 1.0) / 4294967296.0;
  index_.reserve(static_cast<size_t>(1.05 * static_cast<double>(first.keys.size()) / share));
}

bool TableRows::restore(const ImagePage& page) {
  make_room_by(page);
  const size_t floats = row_floats();
  if (page.metas.size() != page.keys.size() || page.rows.size() != page.keys.size() * floats ||
      !resolve(page.keys)) {
    return false;
  }
  for (size_t i = 0; i < page.keys.size(); ++i) {
    const float* from = page.rows.data() + i * floats;
    std::memcpy(row(slots_[i]), from, 4 * slot_floats_);
    std::memcpy(scalar(slots_[i]), from + slot_floats_, 4 * scalars_);
    set_meta(slots_[i], page.metas[i]);
  }
  return true;
}

}  // namespace shoal
