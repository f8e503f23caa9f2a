#include "store/dense_pieces.h"

#include <cassert>
#include <cstring>
#include <vector>

namespace shoal {

size_t DensePieces::memory_bytes() const {
  size_t bytes = 0;
  for (const auto& [piece, memory] : pieces_) {
    bytes += memory.capacity();
  }
  return bytes;
}

float* DensePieces::find(int64_t piece) const {
  const auto it = pieces_.find(piece);
  return it == pieces_.end() ? nullptr : reinterpret_cast<float*>(it->second.data());
}

float* DensePieces::find_or_make(int64_t piece) {
  assert(valid(piece));
  if (float* found = find(piece)) {
    return found;
  }
  const uint32_t floats = spec_->floats(piece);
  GrowArray memory;
  if (!memory.reserve(size_t{4} * (floats + state_floats(spec_->optimizer, floats)))) {
    return nullptr;
  }
  auto* value = reinterpret_cast<float*>(memory.data());
  init_row(spec_->init, piece, value, floats);
  init_state(spec_->optimizer, value + floats, floats);
  pieces_.emplace(piece, std::move(memory));
  return value;
}

void DensePieces::pull(int64_t piece, Codec codec, std::byte* out) const {
  const uint32_t floats = spec_->floats(piece);
  const float* value = find(piece);
  std::vector<float> fresh;
  if (value == nullptr) {
    fresh.resize(floats);
    init_row(spec_->init, piece, fresh.data(), floats);
    value = fresh.data();
  }
  encode_rows(codec, value, 1, floats, out);
}

bool DensePieces::push(int64_t piece, Codec codec, const std::byte* grad, float lr) {
  float* value = find_or_make(piece);
  if (value == nullptr) {
    return false;
  }
  const uint32_t floats = spec_->floats(piece);
  const float* plain = reinterpret_cast<const float*>(grad);
  if (codec != Codec::fp32) {
    if (decoded_ == nullptr) {
      decoded_ = std::make_unique<float[]>(kPieceFloats);
    }
    decode_rows(codec, grad, 1, floats, decoded_.get());
    plain = decoded_.get();
  }
  update_rows(spec_->optimizer, lr, std::span<float* const>(&value, 1), plain, floats);
  return true;
}

bool DensePieces::assign(int64_t piece, const std::byte* value) {
  float* now = find_or_make(piece);
  if (now == nullptr) {
    return false;
  }
  std::memcpy(now, value, size_t{4} * spec_->floats(piece));
  return true;
}

bool DensePieces::init_once(int64_t piece, const std::byte* value) {
  return find(piece) != nullptr || assign(piece, value);
}

}  // namespace shoal
