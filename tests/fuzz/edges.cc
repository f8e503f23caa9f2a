#include "edges.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

extern "C" {
extern const char __executable_start;
void __sanitizer_cov_trace_pc();
}

namespace edges {
namespace {

constexpr size_t kEdges = size_t{1} << 18;  // by hash: of some ten thousand, few share a place

std::array<uint8_t, kEdges> hits;      // by this input
std::array<uint8_t, kEdges> seen;      // by any input: bit n is for 2^n hits or more
std::array<uint32_t, kEdges> touched;  // those of this input
size_t touched_count = 0;
size_t seen_count = 0;
uint64_t block_before = 0;

void arrive(uint64_t block) {
  const uint64_t hash = (block * 0x9e3779b97f4a7c15u) >> 20;
  const auto edge = static_cast<uint32_t>((hash ^ block_before) % kEdges);
  block_before = hash >> 1;
  if (hits[edge] == 0) touched[touched_count++] = edge;
  if (hits[edge] < UINT8_MAX) ++hits[edge];
}

}  // namespace

void forget_path() {
  for (; touched_count > 0; --touched_count) hits[touched[touched_count - 1]] = 0;
  block_before = 0;
}

size_t count_news() {
  size_t news = 0;
  for (size_t i = 0; i < touched_count; ++i) {
    const uint32_t edge = touched[i];
    const auto often = static_cast<uint8_t>(std::bit_floor(hits[edge]));
    if (seen[edge] == 0) ++seen_count;
    if ((seen[edge] & often) == 0) ++news;
    seen[edge] = static_cast<uint8_t>(seen[edge] | often);
  }
  return news;
}

size_t count_seen() { return seen_count; }

}  // namespace edges

void __sanitizer_cov_trace_pc() {
  const auto here = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  edges::arrive(here - reinterpret_cast<uintptr_t>(&__executable_start));
}
