// From FIPS 180-4 (SHA-256) and RFC 2104 (HMAC). Only a few hundred bytes per connection go through
// here, so it is written to be read, not to be fast.
#include "base/sha256.h"

#include <sys/random.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace shoal {
namespace {

constexpr size_t block_bytes = 64;

constexpr std::array<uint32_t, 64> first_primes() {
  std::array<uint32_t, 64> primes{};
  size_t count = 0;
  for (uint32_t n = 2; count < primes.size(); ++n) {
    bool prime = true;
    for (size_t i = 0; i < count; ++i) {
      prime = prime && n % primes[i] != 0;
    }
    if (prime) {
      primes[count++] = n;
    }
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
    for (int i = 1; i < power; ++i) {
      raised *= candidate;
    }
    if (raised <= target) {
      root = candidate;
    }
  }
  return static_cast<uint32_t>(root);
}

constexpr std::array<uint32_t, 8> initial_state() {
  std::array<uint32_t, 8> state{};
  for (size_t i = 0; i < state.size(); ++i) {
    state[i] = root_fraction(first_primes()[i], 2);
  }
  return state;
}

constexpr std::array<uint32_t, 64> round_constants() {
  constexpr auto primes = first_primes();
  std::array<uint32_t, 64> constants{};
  for (size_t i = 0; i < constants.size(); ++i) {
    constants[i] = root_fraction(primes[i], 3);
  }
  return constants;
}

constexpr auto initial = initial_state();
constexpr auto rounds = round_constants();
static_assert(initial[0] == 0x6a09e667 && rounds[0] == 0x428a2f98 && rounds[63] == 0xc67178f2);

uint32_t load_big_endian(const std::byte* from) {
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) {
    word = (word << 8) | std::to_integer<uint32_t>(from[i]);
  }
  return word;
}

class Sha256 {
 public:
  void update(std::span<const std::byte> data) {
    bytes_ += data.size();
    while (!data.empty()) {
      const size_t n = std::min(data.size(), block_bytes - filled_);
      std::memcpy(block_.data() + filled_, data.data(), n);
      filled_ += n;
      data = data.subspan(n);
      if (filled_ == block_bytes) {
        compress();
        filled_ = 0;
      }
    }
  }

  Digest finish() {
    // Padding: one set bit, zeros, and the message's length in bits as the last 8 bytes of a block.
    const uint64_t bits = bytes_ * 8;
    static constexpr std::array<std::byte, block_bytes> padding{std::byte{0x80}};
    const size_t before_length = block_bytes - 8;
    const size_t pad = (filled_ < before_length ? before_length : block_bytes + before_length) - filled_;
    update(std::span(padding).first(pad));
    std::array<std::byte, 8> length;
    for (size_t i = 0; i < 8; ++i) {
      length[i] = static_cast<std::byte>(bits >> (56 - 8 * i));
    }
    update(length);
    Digest digest;
    for (size_t i = 0; i < digest.size(); ++i) {
      digest[i] = static_cast<std::byte>(state_[i / 4] >> (24 - 8 * (i % 4)));
    }
    return digest;
  }

 private:
  // Section 6.2.2. The eight working variables a..h are s[0]..s[7].
  void compress() {
    std::array<uint32_t, 64> w;
    for (size_t t = 0; t < 16; ++t) {
      w[t] = load_big_endian(block_.data() + 4 * t);
    }
    for (size_t t = 16; t < 64; ++t) {
      const uint32_t sigma0 = std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ (w[t - 15] >> 3);
      const uint32_t sigma1 = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ (w[t - 2] >> 10);
      w[t] = sigma1 + w[t - 7] + sigma0 + w[t - 16];
    }
    std::array<uint32_t, 8> s = state_;
    for (size_t t = 0; t < 64; ++t) {
      const uint32_t sum1 = std::rotr(s[4], 6) ^ std::rotr(s[4], 11) ^ std::rotr(s[4], 25);
      const uint32_t choice = (s[4] & s[5]) ^ (~s[4] & s[6]);
      const uint32_t t1 = s[7] + sum1 + choice + rounds[t] + w[t];
      const uint32_t sum0 = std::rotr(s[0], 2) ^ std::rotr(s[0], 13) ^ std::rotr(s[0], 22);
      const uint32_t majority = (s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]);
      s = {t1 + sum0 + majority, s[0], s[1], s[2], s[3] + t1, s[4], s[5], s[6]};
    }
    for (size_t i = 0; i < s.size(); ++i) {
      state_[i] += s[i];
    }
  }

  std::array<uint32_t, 8> state_ = initial;
  std::array<std::byte, block_bytes> block_;
  size_t filled_ = 0;
  uint64_t bytes_ = 0;
};

}  // namespace

Digest sha256(std::span<const std::byte> data) {
  Sha256 hash;
  hash.update(data);
  return hash.finish();
}

Digest hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> data) {
  std::array<std::byte, block_bytes> inner_key{};
  if (key.size() > block_bytes) {
    const Digest digest = sha256(key);
    std::copy(digest.begin(), digest.end(), inner_key.begin());
  } else {
    std::copy(key.begin(), key.end(), inner_key.begin());
  }
  std::array<std::byte, block_bytes> outer_key = inner_key;
  for (size_t i = 0; i < block_bytes; ++i) {
    inner_key[i] ^= std::byte{0x36};
    outer_key[i] ^= std::byte{0x5c};
  }
  Sha256 inner;
  inner.update(inner_key);
  inner.update(data);
  Sha256 outer;
  outer.update(outer_key);
  outer.update(inner.finish());
  return outer.finish();
}

bool equal_constant_time(const Digest& a, const Digest& b) {
  // Volatile, so that no optimiser may turn the loop into one that stops at the first difference.
  volatile uint8_t difference = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference = static_cast<uint8_t>(difference | std::to_integer<uint8_t>(a[i] ^ b[i]));
  }
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
