#include "store/dense_pieces.h"

#include <cassert>
#include <cstring>
#include <vector>

namespace shoal {

size_t DensePieces::memory_bytes() const {
  size_t bytes = 0;
  for (const auto& [number, piece] : pieces_) bytes += piece.memory.capacity();
  return bytes;
}

size_t DensePieces::value_floats() const {
  size_t floats = 0;
  for (const auto& [number, piece] : pieces_) floats += spec_->floats(number);
  return floats;
}

const DensePieces::Piece* DensePieces::find(int64_t piece) const {
  const auto it = pieces_.find(piece);
  return it == pieces_.end() ? nullptr : &it->second;
}

DensePieces::Piece* DensePieces::find_or_make(int64_t piece) {
  assert(spec_->has_piece(piece));
  if (const auto it = pieces_.find(piece); it != pieces_.end()) return &it->second;
  const uint32_t floats = spec_->floats(piece);
  Piece fresh;
  if (!fresh.memory.reserve(size_t{4} * all_floats(piece))) return nullptr;
  init_row(spec_->init, piece, fresh.value(), floats);
  init_state(spec_->optimizer, fresh.value() + floats, scalar(fresh, piece), floats);
  return &pieces_.emplace(piece, std::move(fresh)).first->second;
}

size_t DensePieces::all_floats(int64_t piece) const {
  const uint32_t floats = spec_->floats(piece);
  return size_t{floats} + state_floats(spec_->optimizer, floats);
}

DensePieces::Piece* DensePieces::find_to_write(int64_t piece) {
  Piece* found = find_or_make(piece);
  const auto unread = image_.find(piece);
  if (found == nullptr || unread == image_.end() || unread->second) return found;
  try {
    unread->second = Old{found->version, {found->value(), found->value() + all_floats(piece)}};
  } catch (const std::bad_alloc&) {  // training goes on; the image is what can be made again
    image_.clear();
    image_broken_ = true;
  }
  return found;
}

void DensePieces::begin_image() {
  image_.clear();
  image_broken_ = false;
  for (const auto& [number, piece] : pieces_) image_.emplace(number, std::nullopt);
}

bool DensePieces::read_image(ImagePage& page) {
  if (image_.empty()) return false;
  const auto& [number, old] = *image_.begin();
  const Piece& now = pieces_.at(number);
  const float* from = old ? old->memory.data() : now.value();
  page.keys.push_back(number);
  page.metas.push_back({.version = old ? old->version : now.version});
  page.rows.insert(page.rows.end(), from, from + all_floats(number));
  image_.erase(image_.begin());
  return !image_.empty();
}

bool DensePieces::restore(const ImagePage& page) {
  size_t at = 0;
  for (size_t i = 0; i < page.keys.size(); ++i) {
    if (!spec_->has_piece(page.keys[i]) || i >= page.metas.size()) return false;
    const size_t floats = all_floats(page.keys[i]);
    Piece* piece = page.rows.size() - at < floats ? nullptr : find_to_write(page.keys[i]);
    if (piece == nullptr) return false;
    std::memcpy(piece->value(), page.rows.data() + at, 4 * floats);
    piece->version = page.metas[i].version;
    at += floats;
  }
  return at == page.rows.size();
}

bool DensePieces::prepare(int64_t piece, bool plain) {
  if (!plain && decoded_ == nullptr) decoded_ = std::make_unique<float[]>(kPieceFloats);
  return find_or_make(piece) != nullptr;
}

uint64_t DensePieces::version(int64_t piece) const {
  const Piece* found = find(piece);
  return found == nullptr ? 0 : found->version;
}

void DensePieces::pull(int64_t piece, Codec codec, std::byte* out) const {
  const uint32_t floats = spec_->floats(piece);
  const Piece* found = find(piece);
  std::vector<float> fresh;
  if (found == nullptr) {
    fresh.resize(floats);
    init_row(spec_->init, piece, fresh.data(), floats);
  }
  encode_rows(codec, found == nullptr ? fresh.data() : found->value(), 1, floats, out);
}

bool DensePieces::push(int64_t piece, Codec codec, const std::byte* grad, float lr, uint64_t version) {
  if (!prepare(piece, codec == Codec::fp32)) return false;
  const float* plain = reinterpret_cast<const float*>(grad);
  if (codec != Codec::fp32) {
    decode_rows(codec, grad, 1, spec_->floats(piece), decoded_.get());
    plain = decoded_.get();
  }
  step(piece, plain, lr, version);
  return true;
}

void DensePieces::step(int64_t piece, const float* grad, float lr, uint64_t version) {
  Piece* found = find_to_write(piece);
  const uint32_t floats = spec_->floats(piece);
  float* value = found->value();
  float* last = scalar(*found, piece);
  update_rows(spec_->optimizer, lr, std::span<float* const>(&value, 1), &last, grad, floats);
  found->version = version;
}

bool DensePieces::push_compensated(int64_t piece, Codec codec, const std::byte* grad, const std::byte* pulled,
                                   float lambda, float lr, uint64_t version) {
  if (!prepare(piece, false)) return false;
  const uint32_t floats = spec_->floats(piece);
  const float* now = find(piece)->value();
  float* full = decoded_.get();
  decode_rows(codec, grad, 1, floats, full);
  for (uint32_t i = 0; i < floats; ++i) {
    float then = 0.0f;
    std::memcpy(&then, pulled + size_t{4} * i, 4);
    full[i] += lambda * full[i] * full[i] * (now[i] - then);
  }
  step(piece, full, lr, version);
  return true;
}

bool DensePieces::assign(int64_t piece, const std::byte* value, uint64_t version) {
  Piece* found = find_to_write(piece);
  if (found == nullptr) return false;
  std::memcpy(found->value(), value, size_t{4} * spec_->floats(piece));
  found->version = version;
  return true;
}

bool DensePieces::init_once(int64_t piece, const std::byte* value, uint64_t version) {
  return this->version(piece) != 0 || assign(piece, value, version);
}

}  // namespace shoal
