// Where every shard is: what the coordinator decides, and servers and clients go by.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "serve/link.h"
#include "store/shard.h"

namespace shoal {

struct ShardPlace {
  uint32_t term = 1;
  std::vector<uint32_t> chain;  // indexes of servers, the head first
};

struct Placement {
  uint32_t version = 0;                // grows with every change
  bool weak = false;                   // an update is acknowledged by the head alone
  std::vector<ServerAddress> servers;  // by index, for the life of the cluster; port 0: gone
  std::vector<ShardPlace> shards;
  std::optional<uint32_t> any_copy;  // a client's choice: pulls are spread over the copies, from this one on

  bool is_up(uint32_t server) const { return server < servers.size() && servers[server].port != 0; }
  uint32_t head(uint32_t shard) const { return shards[shard].chain.front(); }
  // Where a pull sees all that was acknowledged.
  uint32_t reader(uint32_t shard) const {
    return weak ? shards[shard].chain.front() : shards[shard].chain.back();
  }
  uint32_t pulled_from(uint32_t shard) const {
    const std::vector<uint32_t>& chain = shards[shard].chain;
    return any_copy ? chain[(*any_copy + shard) % chain.size()] : reader(shard);
  }
  std::vector<uint32_t> up() const;
  // The places of one server in all chains.
  std::vector<ChainPlace> places_of(uint32_t server) const;
};

}  // namespace shoal
