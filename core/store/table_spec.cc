#include "store/table_spec.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/hash.h"

namespace shoal {
namespace {

constexpr uint32_t kNameMax = 512;

// Fixed little-endian layout; the name follows.
struct Packed {
  uint32_t id;
  uint32_t generation;
  uint64_t dim;
  uint64_t seed;
  int64_t range_low;
  int64_t range_high;
  double beta1;
  double beta2;
  float lr, momentum, dampening, weight_decay, lr_decay, initial, eps, l1, l2, beta;
  float init_a, init_b;
  uint8_t dense;
  uint8_t optimizer;
  uint8_t nesterov;
  uint8_t init;
  uint32_t name_bytes;
};
static_assert(sizeof(Packed) == 112);
static_assert(std::endian::native == std::endian::little);

}  // namespace

uint32_t TableSpec::floats(int64_t key) const {
  if (!dense) return static_cast<uint32_t>(dim);
  const uint64_t first = static_cast<uint64_t>(key) * kPieceFloats;
  return static_cast<uint32_t>(std::min<uint64_t>(kPieceFloats, dim - first));
}

Status check_table(const TableSpec& spec) {
  const std::string what = (spec.dense ? "tensor '" : "table '") + spec.name + "'";
  if (spec.id == 0 || spec.name.empty() || spec.name.size() > kNameMax) {
    return {Code::bad_input, what + ": names have 1 to 512 bytes and ids are above 0"};
  }
  if (spec.dense ? (spec.dim < 1 || spec.dim > kTensorFloatsMax) : (spec.dim < 1 || spec.dim > kDimMax)) {
    return {Code::bad_input, what + ": " + (spec.dense ? "size " : "dim ") + std::to_string(spec.dim) +
                                 " is not in 1.." + std::to_string(spec.dense ? kTensorFloatsMax : kDimMax)};
  }
  if (spec.dense && spec.optimizer.kind == OptimizerKind::rowwise_adagrad) {
    return {Code::bad_input, what + ": row-wise Adagrad needs rows; use Adagrad for a dense tensor"};
  }
  if (Status status = check_optimizer(spec.optimizer); !status.ok()) {
    return {status.code(), what + ": " + status.message()};
  }
  if (Status status = check_init(spec.init); !status.ok()) {
    return {status.code(), what + ": " + status.message()};
  }
  return {};
}

bool same_table(const TableSpec& a, const TableSpec& b) {
  return a.dense == b.dense && a.dim == b.dim && a.name == b.name && a.seed == b.seed &&
         a.init.kind == b.init.kind && a.init.a == b.init.a && a.init.b == b.init.b &&
         a.range_low == b.range_low && a.range_high == b.range_high && same_layout(a.optimizer, b.optimizer);
}

std::string describe(const TableSpec& spec) {
  return (spec.dense ? "tensor '" : "table '") + spec.name + "' (id " + std::to_string(spec.id) + ", " +
         (spec.dense ? "size " : "dim ") + std::to_string(spec.dim) + ", optimizer kind " +
         std::to_string(static_cast<int>(spec.optimizer.kind)) + ", seed " + std::to_string(spec.seed) + ")";
}

std::vector<std::byte> encode_table(const TableSpec& spec) {
  const OptimizerSpec& o = spec.optimizer;
  Packed packed{};
  packed.id = spec.id;
  packed.generation = spec.generation;
  packed.dim = spec.dim;
  packed.seed = spec.seed;
  packed.range_low = spec.range_low;
  packed.range_high = spec.range_high;
  packed.beta1 = o.beta1;
  packed.beta2 = o.beta2;
  packed.lr = o.lr;
  packed.momentum = o.momentum;
  packed.dampening = o.dampening;
  packed.weight_decay = o.weight_decay;
  packed.lr_decay = o.lr_decay;
  packed.initial = o.initial;
  packed.eps = o.eps;
  packed.l1 = o.l1;
  packed.l2 = o.l2;
  packed.beta = o.beta;
  packed.init_a = spec.init.a;
  packed.init_b = spec.init.b;
  packed.dense = spec.dense ? 1 : 0;
  packed.optimizer = static_cast<uint8_t>(o.kind);
  packed.nesterov = o.nesterov ? 1 : 0;
  packed.init = static_cast<uint8_t>(spec.init.kind);
  packed.name_bytes = static_cast<uint32_t>(spec.name.size());
  std::vector<std::byte> bytes(sizeof(Packed) + spec.name.size());
  std::memcpy(bytes.data(), &packed, sizeof packed);
  std::memcpy(bytes.data() + sizeof packed, spec.name.data(), spec.name.size());
  return bytes;
}

Result<TableSpec> decode_table(std::span<const std::byte> bytes) {
  Packed packed;
  if (bytes.size() < sizeof packed) return Status{Code::refused, "a table's description is cut short"};
  std::memcpy(&packed, bytes.data(), sizeof packed);
  if (packed.name_bytes != bytes.size() - sizeof packed || packed.name_bytes > kNameMax) {
    return Status{Code::refused, "a table's description has a name of the wrong length"};
  }
  if (packed.optimizer < 1 || packed.optimizer > 6 || packed.init < 1 || packed.init > 4) {
    return Status{Code::refused, "a table's description names an unknown optimizer or initialiser"};
  }
  TableSpec spec;
  OptimizerSpec& o = spec.optimizer;
  spec.id = packed.id;
  spec.generation = packed.generation;
  spec.dense = packed.dense != 0;
  spec.dim = packed.dim;
  spec.name.assign(reinterpret_cast<const char*>(bytes.data()) + sizeof packed, packed.name_bytes);
  spec.seed = packed.seed;
  spec.range_low = packed.range_low;
  spec.range_high = packed.range_high;
  o.kind = static_cast<OptimizerKind>(packed.optimizer);
  o.nesterov = packed.nesterov != 0;
  o.lr = packed.lr;
  o.momentum = packed.momentum;
  o.dampening = packed.dampening;
  o.weight_decay = packed.weight_decay;
  o.lr_decay = packed.lr_decay;
  o.initial = packed.initial;
  o.eps = packed.eps;
  o.beta1 = packed.beta1;
  o.beta2 = packed.beta2;
  o.l1 = packed.l1;
  o.l2 = packed.l2;
  o.beta = packed.beta;
  spec.init.kind = static_cast<InitKind>(packed.init);
  spec.init.a = packed.init_a;
  spec.init.b = packed.init_b;
  spec.init.salt = mix64(spec.seed ^ hash_name(spec.name));
  if (Status status = check_table(spec); !status.ok()) return status;
  return spec;
}

}  // namespace shoal
