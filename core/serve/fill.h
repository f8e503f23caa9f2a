// A new last server of a shard's chain: it gets an image of the shard and then what was pushed since.
#pragma once

#include <chrono>

#include "serve/session.h"

namespace shoal {

// See Server::fill.
Status fill_replica(ServerState& server, uint32_t shard, uint32_t target,
                    std::chrono::steady_clock::time_point deadline);

}  // namespace shoal
