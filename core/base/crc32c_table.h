// The portable CRC-32C: eight tables of 256 words, eight bytes a turn. `crc32c` uses it where the CPU
// has no instruction for it; in its own header so that a test can hold the two against each other.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace shoal {

inline constexpr uint32_t crc32c_polynomial = 0x82f63b78;  // 0x1edc6f41 with its bits reversed

using Crc32cTables = std::array<std::array<uint32_t, 256>, 8>;

// tables[k][b] is what the byte b contributes after k more bytes have passed.
constexpr Crc32cTables make_crc32c_tables() {
  Crc32cTables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1) != 0 ? crc32c_polynomial : 0);
    }
    tables[0][byte] = crc;
  }
  for (size_t k = 1; k < tables.size(); ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xff];
    }
  }
  return tables;
}

inline constexpr Crc32cTables crc32c_tables = make_crc32c_tables();

inline uint32_t crc32c_by_table(std::span<const std::byte> data, uint32_t crc = 0) {
  const auto& tables = crc32c_tables;
  crc = ~crc;
  while (data.size() >= 8) {
    uint32_t next = 0;
    for (size_t i = 0; i < 8; ++i) {
      // Bytes one by one rather than words: right on either byte order and any alignment.
      const uint32_t mask = i < 4 ? crc >> (8 * i) : 0;
      next ^= tables[7 - i][(std::to_integer<uint32_t>(data[i]) ^ mask) & 0xff];
    }
    crc = next;
    data = data.subspan(8);
  }
  for (const std::byte byte : data) {
    crc = (crc >> 8) ^ tables[0][(crc ^ std::to_integer<uint32_t>(byte)) & 0xff];
  }
  return ~crc;
}

}  // namespace shoal
