// CRC-32C (Castagnoli), with the CPU's instruction where there is one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace shoal {

uint32_t crc32c(std::span<const std::byte> data, uint32_t crc = 0);
// What `crc32c` does where the CPU has no instruction for it.
uint32_t crc32c_by_table(std::span<const std::byte> data, uint32_t crc = 0);

}  // namespace shoal
