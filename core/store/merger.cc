#include "store/merger.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "base/copy.h"
#include "base/hash.h"

namespace shoal {
namespace {

constexpr size_t kAhead = 16;  // rows asked for before they are read

void add_row(float* sum, const float* row, uint32_t dim) {
  for (uint32_t i = 0; i < dim; ++i) sum[i] += row[i];
}

}  // namespace

template <typename First, typename Again>
uint32_t Merger::run(std::span<const int64_t> keys, int64_t* keys_out, First first, Again again) {
  const size_t size = std::bit_ceil(std::max<size_t>(16, keys.size() * 2));
  if (cells_.size() < size || stamp_ == 0xffffffffu) {
    cells_.assign(std::max(size, cells_.size()), Cell{});
    stamp_ = 0;
  }
  ++stamp_;
  const size_t mask = size - 1;
  uint32_t distinct = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    size_t at = mix64(static_cast<uint64_t>(keys[i])) & mask;
    while (cells_[at].stamp == stamp_ && keys_out[cells_[at].number] != keys[i]) at = (at + 1) & mask;
    if (cells_[at].stamp == stamp_) {
      again(cells_[at].number, i);
      continue;
    }
    cells_[at] = {stamp_, distinct};
    keys_out[distinct] = keys[i];
    first(distinct, i);
    ++distinct;
  }
  return distinct;
}

uint32_t Merger::merge(PushMode mode, std::span<const int64_t> keys, const uint32_t* positions,
                       const float* rows, uint32_t dim, int64_t* keys_out, float* sums_out) {
  const auto row = [&](size_t i) {
    if (i + kAhead < keys.size()) prefetch_row(rows + size_t{positions[i + kAhead]} * dim, size_t{4} * dim);
    return rows + size_t{positions[i]} * dim;
  };
  const auto set = [&](uint32_t n, size_t i) {
    std::memcpy(sums_out + size_t{n} * dim, row(i), size_t{4} * dim);
  };
  if (mode == PushMode::assign) return run(keys, keys_out, set, set);
  return run(keys, keys_out, set,
             [&](uint32_t n, size_t i) { add_row(sums_out + size_t{n} * dim, row(i), dim); });
}

uint32_t Merger::merge(std::span<const int64_t> keys, const WeightedRow* rows, uint32_t dim,
                       int64_t* keys_out, float* sums_out) {
  const auto set = [&](uint32_t n, size_t i) {
    float* sum = sums_out + size_t{n} * dim;
    for (uint32_t j = 0; j < dim; ++j) sum[j] = rows[i].weight * rows[i].row[j];
  };
  const auto add = [&](uint32_t n, size_t i) {
    float* sum = sums_out + size_t{n} * dim;
    for (uint32_t j = 0; j < dim; ++j) sum[j] += rows[i].weight * rows[i].row[j];
  };
  return run(keys, keys_out, set, add);
}

uint32_t Merger::distinct(std::span<const int64_t> keys, uint32_t base, int64_t* keys_out, uint32_t* heads,
                          uint32_t* before) {
  return run(
      keys, keys_out,
      [&](uint32_t n, size_t i) {
        before[i] = kNone;
        heads[n] = base + static_cast<uint32_t>(i);
      },
      [&](uint32_t n, size_t i) { before[i] = std::exchange(heads[n], base + static_cast<uint32_t>(i)); });
}

}  // namespace shoal
