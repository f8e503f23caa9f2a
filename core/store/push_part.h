// What is pushed to one shard.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "wire/codec.h"

namespace shoal {

inline constexpr uint64_t kNoVersion = UINT64_MAX;

// `settings`: no rows, but the hyper-parameters that the parts behind it are the first to be made with; sent
// between the servers of a chain only.
enum class PushMode : uint8_t { update = 0, assign = 1, init_once = 2, settings = 3 };

// How many updates a gradient is behind: those from the pull it was made from to the one that it is in, which
// counts. One that nothing came between has 1.
struct Staleness {
  uint64_t count = 0;
  uint64_t sum = 0;
  uint64_t max = 0;

  void note(uint64_t version_read, uint64_t version) {
    if (version_read >= version) return;  // not known
    ++count;
    sum += version - version_read;
    max = std::max(max, version - version_read);
  }
};

// The rows of one table within a push to one shard. For a dense tensor keys are piece numbers.
struct PushPart {
  uint32_t table = 0;
  uint32_t term = 0;
  PushMode mode = PushMode::update;
  Codec codec = Codec::fp32;
  float lr = 0.0f;  // NaN: the table's own
  std::span<const int64_t> keys = {};
  std::span<const std::byte> values = {};  // one encoded row per key
  uint64_t version_read = kNoVersion;      // of the pull before
  bool by_staleness = false;               // divides lr by the updates since then
  float dc_lambda = 0.0f;                  // dense: g += lambda * g * g * (value - pulled)
  std::span<const std::byte> pulled = {};  // fp32, where lambda is not 0
};

// What a gradient made from `version_read` is divided by in the update that makes `version`.
inline float staleness_divisor(bool by_staleness, uint64_t version_read, uint64_t version) {
  return by_staleness && version_read < version ? static_cast<float>(version - version_read) : 1.0f;
}

}  // namespace shoal
