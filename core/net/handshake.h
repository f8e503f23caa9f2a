// Mutual proof that both ends of a connection hold the cluster's token, without sending it.
//
//   client -> server   nonce_c
//   server -> client   nonce_s
//   client -> server   client id, incarnation, client_proof; the server closes unless it verifies
//   server -> client   server_proof; likewise the client
//
// All fields are of fixed size, so nothing is allocated from a length that a stranger sent. Each end
// draws its own nonce (random_nonce) for every connection and never reuses one: old proofs are void.
// The two proofs carry different labels, so a server's answer can not be sent back to it as a client's.
//
// This proves who is at the other end when the connection is made. It does not hide or sign what comes
// after: a network where others can alter packets needs TLS. An empty token proves nothing; whoever
// runs without a token decides so above this layer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/sha256.h"

namespace shoal {

// Never compare proofs with ==: equal_constant_time.
Digest client_proof(std::span<const std::byte> token, const Digest& nonce_c, const Digest& nonce_s,
                    uint64_t client_id, uint32_t incarnation);
Digest server_proof(std::span<const std::byte> token, const Digest& nonce_c, const Digest& nonce_s,
                    uint64_t client_id, uint32_t incarnation);

}  // namespace shoal
