#include "net/handshake.h"

#include <set>
#include <string>
#include <string_view>

#include "check.h"

using namespace shoal;

namespace {

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }
const Digest nonce_c = sha256(bytes_of("client's nonce"));
const Digest nonce_s = sha256(bytes_of("server's nonce"));
const auto token = bytes_of("the cluster's token");

}  // namespace

TEST(a_proof_can_not_be_reflected) {
  const Digest server = server_proof(token, nonce_c, nonce_s, 7, 3);
  CHECK(server != client_proof(token, nonce_c, nonce_s, 7, 3));
  // Nor by an attacker who also echoes the nonces the other way round.
  CHECK(server != client_proof(token, nonce_s, nonce_c, 7, 3));
}

TEST(every_input_changes_the_proof) {
  const auto other_token = bytes_of("another token");
  std::set<Digest> proofs;
  for (const auto proof : {&client_proof, &server_proof}) {
    proofs.insert(proof(token, nonce_c, nonce_s, 7, 3));
    proofs.insert(proof(other_token, nonce_c, nonce_s, 7, 3));
    proofs.insert(proof(token, nonce_s, nonce_s, 7, 3));
    proofs.insert(proof(token, nonce_c, nonce_c, 7, 3));
    proofs.insert(proof(token, nonce_s, nonce_c, 7, 3));
    proofs.insert(proof(token, nonce_c, nonce_s, 8, 3));
    proofs.insert(proof(token, nonce_c, nonce_s, uint64_t{7} << 56, 3));
    proofs.insert(proof(token, nonce_c, nonce_s, 7, 4));
    proofs.insert(proof(token, nonce_c, nonce_s, 7, 3U << 24));
    proofs.insert(proof(token, nonce_c, nonce_s, 3, 7));
  }
  CHECK_EQ(proofs.size(), 20);
}

// The bytes that are signed are part of the protocol: a change needs a new label. From Python's hmac.
TEST(the_transcript_is_frozen) {
  constexpr std::string_view expected = "1c1ec918f39fd2149bcb3c0660928374ab1de99e3b278377120ea3007153b2cb";
  std::string hex;
  for (const std::byte byte : client_proof(token, nonce_c, nonce_s, 0x0102030405060708, 0x090a0b0c)) {
    hex += "0123456789abcdef"[std::to_integer<size_t>(byte >> 4)];
    hex += "0123456789abcdef"[std::to_integer<size_t>(byte & std::byte{15})];
  }
  CHECK_EQ(hex, expected);
}
