#include "store/commit.h"

namespace shoal {
namespace {

struct Head {
  uint64_t seq;
  float lr;
  float clip;
  float scale;
  uint32_t entries;
};
static_assert(sizeof(Head) == 24);

}  // namespace

void encode_commit(const Commit& commit, std::vector<std::byte>& out) {
  const Head head{commit.seq, commit.lr, commit.clip, commit.scale,
                  static_cast<uint32_t>(commit.entries.size())};
  pack(out, &head, 1);
  pack(out, commit.entries.data(), commit.entries.size());
}

bool decode_commit(std::span<const std::byte>& bytes, Commit& commit) {
  Head head{};
  if (!unpack(bytes, head) || !unpack(bytes, commit.entries, head.entries)) return false;
  for (const CommitEntry& entry : commit.entries)
    if (!std::isfinite(entry.weight)) return false;
  commit.seq = head.seq;
  commit.lr = head.lr;
  commit.clip = head.clip;
  commit.scale = head.scale;
  return std::isfinite(commit.scale);
}

}  // namespace shoal
