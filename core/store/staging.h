// Pushes that wait for their round's commit, in one shard: decoded rows under the worker's rank and step,
// and what a commit makes of them. Not thread-safe; the shard's mutex guards it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <vector>

#include "base/status.h"
#include "store/commit.h"
#include "store/dedupe.h"
#include "store/merger.h"
#include "store/push_part.h"
#include "store/table_spec.h"

namespace shoal {

// Shared by all shards of a process.
struct StagedBudget {
  std::atomic<uint64_t> used{0};
  uint64_t bytes_max = uint64_t{1} << 30;
};

class Staging {
 public:
  using SpecOf = std::function<const TableSpec&(uint32_t)>;

  explicit Staging(std::shared_ptr<StagedBudget> budget) : budget_(std::move(budget)) {}
  ~Staging() { budget_->used -= bytes_; }

  // Copies the parts, which were checked; a refusal leaves nothing. `identity` null: client 0.
  Status add(const PushIdentity* identity, uint32_t rank, uint64_t step, std::span<const PushPart> parts,
             const SpecOf& spec_of, bool bounded = true);

  // What one table is stepped by: row i of the sum is `rows + i * stride`.
  struct Sum {
    uint32_t table = 0;
    float lr = 0.0f;
    uint32_t stride = 0;
    std::span<const int64_t> keys = {};
    float* rows = nullptr;
    std::vector<int64_t> merged_keys = {};
    std::unique_ptr<float[]> merged = nullptr;  // null: one contribution alone, as it was staged
  };
  // The commit's sums, before its scale, for an update that makes `version`. They live until `finish`; asking
  // again costs nothing.
  std::vector<Sum>& sums(const Commit& commit, uint64_t version);
  // The commit is done and has made `version`: nothing of its workers up to its steps stays.
  void finish(const Commit& commit, uint64_t version, Staleness& staleness);

  // All that is staged, for another shard to go on with.
  void encode(std::vector<std::byte>& out) const;
  // False: not what was staged in a shard with these tables. `find` gives null for one that there is not.
  using FindSpec = std::function<const TableSpec*(uint32_t)>;
  bool decode(std::span<const std::byte>& in, const FindSpec& find);
  // Of each rank: what is for steps from its clock on. Of ranks without a clock: all.
  void drop_unfinished(std::span<const uint64_t> clocks);

 private:
  bool decode_all(std::span<const std::byte>& in, const FindSpec& find);
  struct Part {
    uint32_t table = 0;
    float lr = 0.0f;
    uint32_t stride = 0;
    uint64_t version_read = kNoVersion;
    bool by_staleness = false;
    std::vector<int64_t> keys = {};
    std::unique_ptr<float[]> rows = nullptr;
  };
  struct Contribution {
    std::vector<Part> parts;
    uint64_t bytes = 0;
  };
  using Name = std::tuple<uint32_t, uint64_t, uint64_t, uint32_t>;  // rank, step, client, incarnation
  using Weighted = std::vector<std::pair<const Part*, float>>;

  using Staged = std::map<Name, Contribution>;

  void clear();
  Staged::iterator erase(Staged::iterator at);  // gives the next
  static Part copy(const PushPart& part, const TableSpec& spec);
  Sum merge(const Weighted& parts);

  const std::shared_ptr<StagedBudget> budget_;
  Staged staged_;
  uint64_t bytes_ = 0;
  uint64_t summed_ = 0;  // the commit that sums_ are of
  std::vector<Sum> sums_;
  Merger merger_;
};

}  // namespace shoal
