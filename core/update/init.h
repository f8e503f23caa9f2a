// First values of rows. They depend only on (seed, table name, key, element): the same on any server,
// in any order, in any run, on any CPU kind. Nothing is stored until a row is born.
#pragma once

#include <cstdint>

#include "base/status.h"

namespace shoal {

// The numbers travel on the wire and lie in checkpoints: never reuse one.
enum class InitKind : uint8_t { zeros = 1, constant = 2, uniform = 3, normal = 4 };

struct InitSpec {
  InitKind kind = InitKind::zeros;
  float a = 0.0f;     // constant: the value; uniform: low; normal: mean
  float b = 0.0f;     // uniform: high (excluded); normal: standard deviation
  uint64_t salt = 0;  // mix64(seed ^ hash_name(table name)): names the stream of this table
};

Status check_init(const InitSpec& spec);

// Writes the first value of the row `key`.
void init_row(const InitSpec& spec, int64_t key, float* value, uint32_t dim);

}  // namespace shoal
