// SHA-256 and HMAC-SHA-256, for the token's proof. Hand-written so that the core links to nothing.
#pragma once

#include <array>
#include <cstddef>
#include <span>

namespace shoal {

using Digest = std::array<std::byte, 32>;

Digest sha256(std::span<const std::byte> data);
Digest hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> data);

// Compares in time that does not depend on where the digests differ.
bool equal_constant_time(const Digest& a, const Digest& b);

// 32 bytes from the kernel's generator (getrandom).
Digest random_nonce();

}  // namespace shoal
