// What a client was told of each shard by answers: when a server takes a shard over with less than that, the
// difference is lost. Not thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <span>
#include <utility>
#include <vector>

#include "base/mutants.h"
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
  explicit Acknowledged(size_t shards) : shards_(shards) {}

  // An answer to a push.
  void note(std::span<const Part> answer, bool staged) {
    for (const Part& part : answer) {
      if (part.shard >= shards_.size()) continue;
      seen(part.shard, part.term, part.version);
      if (part.samples == 0) continue;
      PerShard& here = shards_[part.shard];
      // A duplicate's version is that of the push itself; what is staged makes no version of its own.
      here.unheld.push_back({part.term, staged, staged ? log_entry(part) : part.version});
      // Answers come in another order than entries by what is open at most.
      while (here.unheld.size() > part.samples + kOpenPushesMax) here.unheld.pop_front();
    }
  }

  // An answer to a pull.
  void seen(std::span<const Part> answer) {
    for (const Part& part : answer) {
      if (part.version == kNoVersion || part.shard >= shards_.size()) continue;
      const uint64_t known = seen(part.shard, part.term, part.version);
      reads_behind_ += known > part.version ? 1 : 0;
      versions_behind_max_ = std::max(versions_behind_max_, known - part.version);
    }
  }

  // Pulls of a shard that lacked something which this client had been told of when the answer came, and how
  // many of the shard's versions at most.
  uint64_t reads_behind() const { return reads_behind_; }
  uint64_t versions_behind_max() const { return versions_behind_max_; }

  Loss taken_over(uint16_t shard, const Shard::Began& began) {
    Loss loss;
    if (shard >= shards_.size()) return loss;
    PerShard& here = shards_[shard];
    std::erase_if(here.versions, [&](const auto& one) {
      if (one.first >= began.term) return false;
      loss.version = std::max(loss.version, one.second);
      return true;
    });
    const uint64_t more = SHOAL_MUTANT(loss_off_by_one) ? 1 : 0;
    loss.pushes = std::erase_if(here.unheld, [&](const Unheld& one) {
      return one.term < began.term && one.number > (one.staged ? began.entry : began.version) + more;
    });
    // What it has taken over may be lost with it.
    for (Unheld& one : here.unheld) one.term = std::max(one.term, began.term);
    if (loss.version > 0 && !SHOAL_MUTANT(takeover_forgets))
      seen(shard, began.term, std::min(loss.version, began.version));
    return loss;
  }

 private:
  // In that term this version was there; the newest that was.
  uint64_t seen(uint16_t shard, uint32_t term, uint64_t version) {
    if (version == kNoVersion || shard >= shards_.size()) return 0;
    PerShard& here = shards_[shard];
    // Mostly the term of the last time: this is on the way of every push.
    if (here.versions.empty() || here.versions.back().first != term) {
      const auto older = [term](const auto& one) { return one.first == term; };
      const auto it = std::find_if(here.versions.begin(), here.versions.end(), older);
      if (it == here.versions.end())
        here.versions.emplace_back(term, 0);
      else
        std::rotate(it, it + 1, here.versions.end());
    }
    uint64_t& newest = here.versions.back().second;
    newest = std::max(newest, version);
    return newest;
  }

  struct Unheld {
    uint32_t term;
    bool staged;
    uint64_t number;
  };
  struct PerShard {
    std::vector<std::pair<uint32_t, uint64_t>> versions =
        {};  // by term the newest; the last one that came is last
    std::deque<Unheld> unheld = {};
  };
  std::vector<PerShard> shards_;
  uint64_t reads_behind_ = 0, versions_behind_max_ = 0;
};

}  // namespace shoal
