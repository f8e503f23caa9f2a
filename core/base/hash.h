// The one hash of the store. Placement, index and initial values all derive from it, so it is part of
// the format: changing it moves every row and changes every initial value.
#pragma once

#include <cstdint>
#include <string_view>

namespace shoal {

// A bijective mix of 64 bits (the finaliser of splitmix64): equal spread for any pattern of keys.
inline uint64_t mix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// Names (tables, tensors) to 64 bits: FNV-1a, then mixed.
inline uint64_t hash_name(std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325ULL;
  for (const char c : name) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3ULL;
  return mix64(hash);
}

// Maps 32 well-mixed bits to [0, n), keeping their order.
inline uint32_t fast_range(uint32_t bits, uint32_t n) {
  return static_cast<uint32_t>((static_cast<uint64_t>(bits) * n) >> 32);
}

}  // namespace shoal
