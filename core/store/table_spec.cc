#include "store/table_spec.h"

#include <bit>
#include <cassert>
#include <cstring>
#include <type_traits>

#include "base/hash.h"
#include "wire/pack.h"

namespace shoal {
namespace {

constexpr uint32_t kNameMax = 512;

// Little-endian, one field after the other; the name follows.
constexpr size_t kFixedBytes = 112;
static_assert(std::endian::native == std::endian::little);

// Hands every fixed field to `visit`, in the order of the wire.
template <typename Spec, typename Visit>
void each_field(Spec& spec, uint32_t& name_bytes, Visit visit) {
  auto& o = spec.optimizer;
  const auto all = [&](auto&... fields) { (visit(fields), ...); };
  all(spec.id, spec.generation, spec.dim, spec.seed, spec.range_low, spec.range_high, o.beta1, o.beta2);
  all(o.lr, o.momentum, o.dampening, o.weight_decay, o.lr_decay, o.initial, o.eps, o.l1, o.l2, o.beta);
  all(spec.init.a, spec.init.b, spec.dense, o.kind, o.nesterov, spec.init.kind, name_bytes);
}

}  // namespace

std::optional<size_t> TableSpec::rows_bytes(std::span<const int64_t> keys, Codec codec) const {
  if (!dense) return keys.size() * encoded_bytes(codec, static_cast<uint32_t>(dim));
  size_t bytes = 0;
  for (const int64_t key : keys) {
    if (!has_piece(key)) return std::nullopt;
    bytes += encoded_bytes(codec, floats(key));
  }
  return bytes;
}

Status check_table(const TableSpec& spec) {
  const std::string what = title(spec);
  if (spec.id == 0 || spec.name.empty() || spec.name.size() > kNameMax)
    return {Code::bad_input, what + ": names have 1 to 512 bytes and ids are above 0"};
  if (spec.dense ? (spec.dim < 1 || spec.dim > kTensorFloatsMax) : (spec.dim < 1 || spec.dim > kDimMax)) {
    return {Code::bad_input, what + ": " + (spec.dense ? "size " : "dim ") + std::to_string(spec.dim) +
                                 " is not in 1.." + std::to_string(spec.dense ? kTensorFloatsMax : kDimMax)};
  }
  if (spec.dense && spec.optimizer.kind == OptimizerKind::rowwise_adagrad)
    return {Code::bad_input, what + ": row-wise Adagrad needs rows; use Adagrad for a dense tensor"};
  if (Status status = check_optimizer(spec.optimizer); !status.ok())
    return {status.code(), what + ": " + status.message()};
  if (Status status = check_init(spec.init); !status.ok())
    return {status.code(), what + ": " + status.message()};
  return {};
}

bool same_table(const TableSpec& a, const TableSpec& b) {
  return a.dense == b.dense && a.dim == b.dim && a.name == b.name && a.seed == b.seed &&
         a.init.kind == b.init.kind && a.init.a == b.init.a && a.init.b == b.init.b &&
         a.range_low == b.range_low && a.range_high == b.range_high && same_layout(a.optimizer, b.optimizer);
}

std::string title(const TableSpec& spec) { return (spec.dense ? "tensor '" : "table '") + spec.name + "'"; }

std::string describe(const TableSpec& spec) {
  return title(spec) + " (id " + std::to_string(spec.id) + ", " + (spec.dense ? "size " : "dim ") +
         std::to_string(spec.dim) + ", optimizer kind " +
         std::to_string(static_cast<int>(spec.optimizer.kind)) + ", seed " + std::to_string(spec.seed) + ")";
}

std::vector<std::byte> encode_table(const TableSpec& spec) {
  std::vector<std::byte> bytes;
  auto name_bytes = static_cast<uint32_t>(spec.name.size());
  each_field(spec, name_bytes, [&](const auto& field) {
    const auto raw = std::as_bytes(std::span(&field, 1));
    bytes.insert(bytes.end(), raw.begin(), raw.end());
  });
  assert(bytes.size() == kFixedBytes);
  const auto name = std::as_bytes(std::span(spec.name));
  bytes.insert(bytes.end(), name.begin(), name.end());
  return bytes;
}

Result<TableSpec> decode_table(std::span<const std::byte> bytes) {
  if (bytes.size() < kFixedBytes) return Status{Code::refused, "a table's description is cut short"};
  TableSpec spec;
  uint32_t name_bytes = 0;
  const std::byte* from = bytes.data();
  each_field(spec, name_bytes, [&](auto& field) {
    if constexpr (std::is_same_v<decltype(field), bool&>)
      field = *from != std::byte{0};  // a bool may hold nothing but 0 and 1
    else
      std::memcpy(&field, from, sizeof field);
    from += sizeof field;
  });
  if (name_bytes != bytes.size() - kFixedBytes || name_bytes > kNameMax)
    return Status{Code::refused, "a table's description has a name of the wrong length"};
  const auto optimizer = static_cast<uint8_t>(spec.optimizer.kind);
  const auto init = static_cast<uint8_t>(spec.init.kind);
  if (optimizer < 1 || optimizer > 6 || init < 1 || init > 4)
    return Status{Code::refused, "a table's description names an unknown optimizer or initialiser"};
  spec.name.assign(reinterpret_cast<const char*>(from), name_bytes);
  spec.init.salt = mix64(spec.seed ^ hash_name(spec.name));
  if (Status status = check_table(spec); !status.ok()) return status;
  return spec;
}

void append_tables(std::span<const std::shared_ptr<const TableSpec>> specs, std::vector<std::byte>& out) {
  const auto count = static_cast<uint32_t>(specs.size());
  pack(out, &count, 1);
  for (const auto& spec : specs) {
    const std::vector<std::byte> bytes = encode_table(*spec);
    const auto size = static_cast<uint32_t>(bytes.size());
    pack(out, &size, 1);
    pack(out, bytes.data(), bytes.size());
  }
}

Result<std::vector<std::shared_ptr<const TableSpec>>> take_tables(std::span<const std::byte>& bytes) {
  std::vector<std::shared_ptr<const TableSpec>> specs;
  uint32_t count = 0;
  bool whole = unpack(bytes, count);
  for (uint32_t i = 0; whole && i < count; ++i) {
    uint32_t size = 0;
    whole = unpack(bytes, size) && size <= bytes.size();
    if (!whole) break;
    Result<TableSpec> spec = decode_table(bytes.first(size));
    if (!spec.ok()) return spec.status();
    specs.push_back(std::make_shared<const TableSpec>(std::move(*spec)));
    bytes = bytes.subspan(size);
  }
  if (!whole) return Status{Code::refused, "a list of tables' settings is cut short"};
  return specs;
}

}  // namespace shoal
