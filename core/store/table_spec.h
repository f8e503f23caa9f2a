// What a server must know of a table or of a dense tensor, and its form on the wire.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "update/init.h"
#include "update/optimizer.h"
#include "wire/codec.h"

namespace shoal {

inline constexpr uint32_t kDimMax = 4096;
inline constexpr uint32_t kPieceFloats = 65536;  // a dense tensor is cut into pieces of this many
inline constexpr uint64_t kTensorFloatsMax = uint64_t{1} << 40;

struct TableSpec {
  uint32_t id = 0;          // granted once per name and never reused; 0 is no table
  uint32_t generation = 0;  // grows when a later open changes hyper-parameters
  bool dense = false;
  uint64_t dim = 0;  // tables: floats in a row, 1..4096; tensors: elements
  std::string name;
  uint64_t seed = 0;
  OptimizerSpec optimizer;
  InitSpec init;
  int64_t range_low = 0;  // placement by range where low < high, by hash otherwise
  int64_t range_high = 0;

  uint32_t pieces() const { return static_cast<uint32_t>((dim + kPieceFloats - 1) / kPieceFloats); }
  bool has_piece(int64_t key) const { return key >= 0 && key < static_cast<int64_t>(pieces()); }
  // Floats in the row or piece `key`.
  uint32_t floats(int64_t key) const {
    const uint64_t before = dense ? static_cast<uint64_t>(key) * kPieceFloats : 0;
    return static_cast<uint32_t>(std::min<uint64_t>(kPieceFloats, dim - before));
  }
  // Bytes of the encoded rows of `keys`, or nothing where a tensor has no such piece.
  std::optional<size_t> rows_bytes(std::span<const int64_t> keys, Codec codec) const;
};

Status check_table(const TableSpec& spec);
// Whether `b` may go on with the rows of `a`: all but hyper-parameters equal.
bool same_table(const TableSpec& a, const TableSpec& b);
std::string title(const TableSpec& spec);     // "table 'items'", for messages
std::string describe(const TableSpec& spec);  // with its settings

std::vector<std::byte> encode_table(const TableSpec& spec);
Result<TableSpec> decode_table(std::span<const std::byte> bytes);
// Several: their number, then each with its length. `take_tables` takes them from the front of `bytes`.
void append_tables(std::span<const std::shared_ptr<const TableSpec>> specs, std::vector<std::byte>& out);
Result<std::vector<std::shared_ptr<const TableSpec>>> take_tables(std::span<const std::byte>& bytes);

}  // namespace shoal
