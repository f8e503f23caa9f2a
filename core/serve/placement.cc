#include "serve/placement.h"

#include <algorithm>

namespace shoal {

std::vector<uint32_t> Placement::up() const {
  std::vector<uint32_t> indexes;
  for (uint32_t i = 0; i < servers.size(); ++i)
    if (is_up(i)) indexes.push_back(i);
  return indexes;
}

std::vector<ChainPlace> Placement::places_of(uint32_t server) const {
  std::vector<ChainPlace> places;
  places.reserve(shards.size());
  for (uint32_t s = 0; s < shards.size(); ++s) {
    const std::vector<uint32_t>& chain = shards[s].chain;
    const auto at = std::find(chain.begin(), chain.end(), server);
    ChainPlace place{.term = shards[s].term, .head = false, .reads = false, .next = kNobody, .member = false};
    if (at != chain.end()) {
      place.member = true;
      place.head = at == chain.begin();
      place.reads = reader(s) == server;
      if (at + 1 != chain.end()) place.next = at[1];
    }
    places.push_back(place);
  }
  return places;
}

}  // namespace shoal
