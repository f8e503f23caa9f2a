// What is pushed to one shard.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "wire/codec.h"

namespace shoal {

inline constexpr uint64_t kNoVersion = UINT64_MAX;

enum class PushMode : uint8_t { update = 0, assign = 1, init_once = 2 };

// The rows of one table within a push to one shard. For a dense tensor keys are piece numbers.
struct PushPart {
  uint32_t table = 0;
  uint32_t term = 0;
  PushMode mode = PushMode::update;
  Codec codec = Codec::fp32;
  float lr = 0.0f;  // NaN: the table's own
  std::span<const int64_t> keys = {};
  std::span<const std::byte> values = {};  // one encoded row per key
  uint64_t version_read = kNoVersion;      // divides lr by the updates since then
  float dc_lambda = 0.0f;                  // dense: g += lambda * g * g * (value - pulled)
  const std::byte* pulled = nullptr;       // fp32, where lambda is not 0
};

}  // namespace shoal
