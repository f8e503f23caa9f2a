#include "net/handshake.h"

#include <algorithm>
#include <array>
#include <string_view>

namespace shoal {
namespace {

constexpr std::string_view client_label = "shoal client v1";
constexpr std::string_view server_label = "shoal server v1";
// Every field has one length, so two different inputs never give the same bytes.
static_assert(client_label.size() == server_label.size());

constexpr size_t transcript_bytes =
    client_label.size() + 2 * sizeof(Digest) + sizeof(uint64_t) + sizeof(uint32_t);

template <typename T>
std::byte* put_little_endian(std::byte* to, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) *to++ = static_cast<std::byte>(value >> (8 * i));
  return to;
}

Digest proof(std::string_view label, std::span<const std::byte> token, const Digest& nonce_c,
             const Digest& nonce_s, uint64_t client_id, uint32_t incarnation) {
  std::array<std::byte, transcript_bytes> transcript;
  std::byte* to = transcript.data();
  to = std::transform(label.begin(), label.end(), to, [](char c) { return static_cast<std::byte>(c); });
  to = std::copy(nonce_c.begin(), nonce_c.end(), to);
  to = std::copy(nonce_s.begin(), nonce_s.end(), to);
  to = put_little_endian(to, client_id);
  put_little_endian(to, incarnation);
  return hmac_sha256(token, transcript);
}

}  // namespace

Digest client_proof(std::span<const std::byte> token, const Digest& nonce_c, const Digest& nonce_s,
                    uint64_t client_id, uint32_t incarnation) {
  return proof(client_label, token, nonce_c, nonce_s, client_id, incarnation);
}

Digest server_proof(std::span<const std::byte> token, const Digest& nonce_c, const Digest& nonce_s,
                    uint64_t client_id, uint32_t incarnation) {
  return proof(server_label, token, nonce_c, nonce_s, client_id, incarnation);
}

}  // namespace shoal
