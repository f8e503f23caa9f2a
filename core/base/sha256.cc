// From FIPS 180-4 (SHA-256) and RFC 2104 (HMAC). Only a few hundred bytes per connection go through
// here, so it is written to be read, not to be fast.
#include "base/sha256.h"

#include <sys/random.h>

#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace shoal {
namespace {

constexpr size_t block_bytes = 64;

constexpr std::array<uint32_t, 64> first_primes() {
  std::array<uint32_t, 64> primes{};
  size_t count = 0;
  for (uint32_t n = 2; count < primes.size(); ++n) {
    bool prime = true;
    for (size_t i = 0; i < count; ++i) prime = prime && n % primes[i] != 0;
    if (prime) primes[count++] = n;
  }
  return primes;
}

// The first 32 bits of the fractional part of the square (power 2) or cube (power 3) root of n. The
// standard defines its constants so; deriving them leaves no table to mistype.
constexpr uint32_t root_fraction(uint32_t n, int power) {
  // root(n) * 2^32 is the integer root of n * 2^(32 * power); found bit by bit, and below 2^38.
  const unsigned __int128 target = static_cast<unsigned __int128>(n) << (32 * power);
  uint64_t root = 0;
  for (int bit = 37; bit >= 0; --bit) {
    const uint64_t candidate = root | (uint64_t{1} << bit);
    unsigned __int128 raised = candidate;
    for (int i = 1; i < power; ++i) raised *= candidate;
    if (raised <= target) root = candidate;
  }
  return static_cast<uint32_t>(root);
}

template <size_t count>
constexpr std::array<uint32_t, count> root_fractions(int power) {
  constexpr auto primes = first_primes();
  std::array<uint32_t, count> constants{};
  for (size_t i = 0; i < count; ++i) constants[i] = root_fraction(primes[i], power);
  return constants;
}

constexpr auto initial = root_fractions<8>(2);
constexpr auto rounds = root_fractions<64>(3);
static_assert(initial[0] == 0x6a09e667 && rounds[0] == 0x428a2f98 && rounds[63] == 0xc67178f2);

// Section 6.2.2. The eight working variables a..h are s[0]..s[7].
void compress(std::array<uint32_t, 8>& state, const std::byte* block) {
  std::array<uint32_t, 64> w{};
  for (size_t i = 0; i < block_bytes; ++i) w[i / 4] = (w[i / 4] << 8) | std::to_integer<uint32_t>(block[i]);
  for (size_t t = 16; t < 64; ++t) {
    const uint32_t sigma0 = std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ (w[t - 15] >> 3);
    const uint32_t sigma1 = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ (w[t - 2] >> 10);
    w[t] = sigma1 + w[t - 7] + sigma0 + w[t - 16];
  }
  std::array<uint32_t, 8> s = state;
  for (size_t t = 0; t < 64; ++t) {
    const uint32_t sum1 = std::rotr(s[4], 6) ^ std::rotr(s[4], 11) ^ std::rotr(s[4], 25);
    const uint32_t choice = (s[4] & s[5]) ^ (~s[4] & s[6]);
    const uint32_t t1 = s[7] + sum1 + choice + rounds[t] + w[t];
    const uint32_t sum0 = std::rotr(s[0], 2) ^ std::rotr(s[0], 13) ^ std::rotr(s[0], 22);
    const uint32_t majority = (s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]);
    s = {t1 + sum0 + majority, s[0], s[1], s[2], s[3] + t1, s[4], s[5], s[6]};
  }
  for (size_t i = 0; i < s.size(); ++i) state[i] += s[i];
}

}  // namespace

Digest sha256(std::span<const std::byte> data) {
  // Padding: one set bit, zeros, and the message's length in bits as the last 8 bytes of a block.
  std::vector<std::byte> message(data.begin(), data.end());
  message.push_back(std::byte{0x80});
  message.resize((message.size() + 8 + block_bytes - 1) / block_bytes * block_bytes);
  for (size_t i = 0; i < 8; ++i)
    message[message.size() - 1 - i] = static_cast<std::byte>(uint64_t{data.size()} * 8 >> (8 * i));
  std::array<uint32_t, 8> state = initial;
  for (size_t at = 0; at < message.size(); at += block_bytes) compress(state, message.data() + at);
  Digest digest;
  for (size_t i = 0; i < digest.size(); ++i)
    digest[i] = static_cast<std::byte>(state[i / 4] >> (24 - 8 * (i % 4)));
  return digest;
}

Digest hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> data) {
  const Digest short_key = sha256(key);
  if (key.size() > block_bytes) key = short_key;
  // H(key ^ outer, H(key ^ inner, data)), the key filled up with zeros.
  const auto keyed = [key](std::byte mask, std::span<const std::byte> rest) {
    std::vector<std::byte> message(key.begin(), key.end());
    message.resize(block_bytes);
    for (std::byte& byte : message) byte ^= mask;
    message.insert(message.end(), rest.begin(), rest.end());
    return sha256(message);
  };
  return keyed(std::byte{0x5c}, keyed(std::byte{0x36}, data));
}

bool equal_constant_time(const Digest& a, const Digest& b) {
  // Volatile, so that no optimiser may turn the loop into one that stops at the first difference.
  volatile uint8_t difference = 0;
  for (size_t i = 0; i < a.size(); ++i)
    difference = static_cast<uint8_t>(difference | std::to_integer<uint8_t>(a[i] ^ b[i]));
  return difference == 0;
}

Digest random_nonce() {
  Digest nonce;
  size_t filled = 0;
  while (filled < nonce.size()) {
    const ssize_t n = getrandom(nonce.data() + filled, nonce.size() - filled, 0);
    if (n > 0) {
      filled += static_cast<size_t>(n);
    } else if (errno != EINTR) {
      // Going on with a nonce that can be guessed would give the token away by replay.
      std::perror("shoal: the kernel gives no random bytes (getrandom)");
      std::abort();
    }
  }
  return nonce;
}

}  // namespace shoal
