// What a client was told of each shard by answers: when a server takes a shard over with less than that, the
// difference is lost. Not thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <span>
#include <unordered_map>

#include "store/dedupe.h"
#include "store/shard.h"
#include "wire/frame.h"

namespace shoal {

struct Loss {
  uint64_t version = 0;  // the newest of earlier terms that was acknowledged or read
  uint64_t pushes = 0;   // of this client, acknowledged before the servers behind had them, and gone
};

class Acknowledged {
 public:
  void note(std::span<const Part> answer, bool staged) {
    for (const Part& part : answer) {
      seen(part.shard, part.term, part.version);
      if (part.samples == 0) continue;
      PerShard& here = shards_[part.shard];
      // A duplicate's version is that of the push itself; what is staged makes no version of its own.
      here.unheld.push_back({part.term, staged, staged ? log_entry(part) : part.version});
      // Answers come in another order than entries by what is open at most.
      while (here.unheld.size() > part.samples + kOpenPushesMax) here.unheld.pop_front();
    }
  }

  // A pull in that term has shown this version.
  void seen(uint16_t shard, uint32_t term, uint64_t version) {
    if (version == kNoVersion) return;
    uint64_t& newest = shards_[shard].versions[term];
    newest = std::max(newest, version);
  }

  Loss taken_over(uint16_t shard, const Shard::Began& began) {
    PerShard& here = shards_[shard];
    Loss loss;
    const auto since = here.versions.lower_bound(began.term);
    for (auto it = here.versions.begin(); it != since; it = here.versions.erase(it))
      loss.version = std::max(loss.version, it->second);
    std::erase_if(here.unheld, [&](const Unheld& one) {
      if (one.term >= began.term) return false;
      loss.pushes += one.number > (one.staged ? began.entry : began.version) ? 1 : 0;
      return true;
    });
    return loss;
  }

 private:
  struct Unheld {
    uint32_t term;
    bool staged;
    uint64_t number;
  };
  struct PerShard {
    std::map<uint32_t, uint64_t> versions = {};  // the newest of each term
    std::deque<Unheld> unheld = {};
  };
  std::unordered_map<uint16_t, PerShard> shards_;
};

}  // namespace shoal
