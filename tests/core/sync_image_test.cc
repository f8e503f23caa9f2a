// The sync shard as a checkpoint keeps it: whoever opens it again goes on with the same clocks and units.
#include "check.h"
#include "store/sync_shard.h"

using namespace shoal;

namespace {

constexpr uint64_t kUnits = 8;

struct Job {
  SyncShard shard;
  uint64_t token = 0;
  uint64_t number = 0;
  uint64_t client = 1;  // + rank: another one is another life

  std::vector<SyncShard::Answer> ask(SyncVerb verb, uint32_t rank, uint64_t step = 0, uint64_t count = 0,
                                     std::vector<UnitName> units = {}, uint32_t workers = 2,
                                     Take take = Take::round) {
    SyncRequest request;
    request.verb = verb;
    request.rank = rank;
    request.step = step;
    request.count = count;
    request.units = std::move(units);
    request.number = ++number;
    request.config = {.workers = workers, .take = take};
    request.weight = 1.0f;
    request.client = client + rank;
    request.incarnation = 1;
    return shard.handle(request, ++token, 0.0);
  }
  std::vector<uint64_t> report() { return ask(SyncVerb::report, 0)[0].reply.numbers; }
};

// Two workers have made one round, and the first has finished its part of the next.
Job halfway() {
  Job job;
  for (const uint32_t rank : {0u, 1u}) job.ask(SyncVerb::open, rank);
  job.ask(SyncVerb::ledger_open, 0, 0, kUnits);
  for (const uint32_t rank : {0u, 1u}) job.ask(SyncVerb::advance, rank, 0, 0, {{0, rank}});
  job.ask(SyncVerb::advance, 0, 1, 0, {{0, 2}});
  return job;
}

Job restored(const Job& from) {
  Job job;
  CHECK(job.shard.decode(from.shard.encode()));
  job.client = 100;
  return job;
}

}  // namespace

TEST(a_round_is_gone_on_with_by_new_lives) {
  const Job before = halfway();
  CHECK((before.shard.clocks() == std::vector<uint64_t>{2, 1}));
  Job job = restored(before);
  CHECK((job.report() == std::vector<uint64_t>{kUnits, 3, 2, 1, kUnits - 3, 3}));
  CHECK(job.ask(SyncVerb::open, 0).empty());  // its part of the round is there: it waits for the other
  const auto second = job.ask(SyncVerb::open, 1);
  CHECK(second.size() == 1 && second[0].reply.step == 1);
  CHECK(second[0].reply.commits.size() == 1);  // of the first round: nobody had said that it is done
  const auto closed = job.ask(SyncVerb::advance, 1, 1, 0, {{0, 3}});
  CHECK(closed.size() == 2);
  const Commit& commit = closed[0].reply.commits.back();
  CHECK(commit.entries.size() == 2);
  CHECK(commit.entries[0].client == 1 && commit.entries[1].client == 101);  // the old life's, the new one's
}

TEST(where_a_batch_has_several_steps_none_is_handed_in_for_an_open_round) {
  Job before;
  for (const uint32_t rank : {0u, 1u}) before.ask(SyncVerb::open, rank);
  before.ask(SyncVerb::ledger_open, 0, kStatic | kSeveralSteps, kUnits);
  for (uint64_t step : {0, 1})  // two with the first batch
    for (const uint32_t rank : {0u, 1u})
      before.ask(SyncVerb::advance, rank, step, 0,
                 step == 0 ? std::vector<UnitName>{{0, rank}} : std::vector<UnitName>{});
  before.ask(SyncVerb::advance, 0, 2, 0, {{0, 2}});
  CHECK((before.report() == std::vector<uint64_t>{kUnits, 3, 2, 1, kUnits - 3, 3}));
  CHECK((before.shard.clocks() == std::vector<uint64_t>{2, 2}));
  Job copy;
  CHECK(copy.shard.decode(before.shard.encode(true)));  // another server's
  CHECK((copy.shard.clocks() == std::vector<uint64_t>{2, 2}));
  for (const Job* from : {&before, &copy}) {
    Job job = restored(*from);
    CHECK((job.report() == std::vector<uint64_t>{kUnits, 2, 1, 1, kUnits - 2, 2}));
    for (const uint32_t rank : {0u, 1u}) {
      const auto opened = job.ask(SyncVerb::open, rank);
      CHECK(opened.size() == 1 && opened[0].reply.step == 2);
      CHECK((job.ask(SyncVerb::resume, rank)[0].reply.numbers == std::vector<uint64_t>{rank}));
    }
  }
  CHECK((before.report() == std::vector<uint64_t>{kUnits, 3, 2, 1, kUnits - 3, 3}));  // it goes on as it was
}

TEST(another_number_of_workers_goes_on_with_the_pass_as_it_was_cut) {
  Job job = restored(halfway());
  const auto opened = job.ask(SyncVerb::open, 2, 0, 0, {}, 4);
  CHECK(opened.size() == 1 && opened[0].reply.step == 2);
  CHECK(opened[0].reply.commits.size() == 2);  // what was finished counts
  const std::vector<uint64_t> report = job.report();
  CHECK(report[0] == kUnits && report[1] == 3);
  CHECK(job.ask(SyncVerb::open, 0, 0, 0, {}, 3)[0].reply.status.code() == Code::mismatch);
}

TEST(nobody_waits_for_those_that_a_smaller_job_had_let_go) {
  Job before;
  for (const uint32_t rank : {0u, 1u}) before.ask(SyncVerb::open, rank);
  before.ask(SyncVerb::ledger_open, 0, kStatic, kUnits);
  before.ask(SyncVerb::advance, 0, 0, 0, {{0, 0}});
  before.ask(SyncVerb::resize, 0, 0, 0, {}, 1);  // rank 1 is about to leave
  Job job = restored(before);
  const auto opened = job.ask(SyncVerb::open, 0, 0, 0, {}, 1);
  CHECK(opened.size() == 1 && opened[0].reply.step == 1);
  CHECK((job.ask(SyncVerb::lease, 0, 0, 2)[0].reply.numbers == std::vector<uint64_t>{1, 2, 3, 4}));
}

TEST(a_job_that_goes_on_may_change_its_size_before_all_have_joined) {
  Job job = restored(halfway());
  job.ask(SyncVerb::open, 0, kBack);
  job.ask(SyncVerb::resize, 0, 0, 0, {}, 4);
  const auto late = job.ask(SyncVerb::open, 1, kBack);  // it was told of two
  CHECK(!late.empty() && late[0].reply.status.ok());
}

TEST(what_was_leased_is_leased_again) {
  Job job;
  for (const uint32_t rank : {0u, 1u}) job.ask(SyncVerb::open, rank, 0, 0, {}, 2, Take::each);
  job.ask(SyncVerb::ledger_open, 0, 0, kUnits);
  CHECK((job.ask(SyncVerb::lease, 0, 0, 3)[0].reply.numbers == std::vector<uint64_t>{0, 3}));
  job.ask(SyncVerb::advance, 0, 0, 0, {{0, 1}});
  Job after = restored(job);
  after.ask(SyncVerb::open, 1, 0, 0, {}, 2, Take::each);
  const auto leased = after.ask(SyncVerb::lease, 1, 0, 3)[0].reply.numbers;
  CHECK((leased == std::vector<uint64_t>{0, 1, 2, 4}));
}

TEST(a_copy_of_a_live_one_goes_on_with_the_same_lives) {
  Job job;
  for (const uint32_t rank : {0u, 1u}) job.ask(SyncVerb::open, rank, 0, 0, {}, 2, Take::each);
  job.ask(SyncVerb::ledger_open, 0, 0, kUnits);
  job.ask(SyncVerb::lease, 0, 0, 3);
  Job copy;
  CHECK(copy.shard.decode(job.shard.encode(true)));
  copy.number = job.number;
  CHECK((copy.ask(SyncVerb::lease, 1, 0, 2)[0].reply.numbers == std::vector<uint64_t>{3, 5}));
  const auto done = copy.ask(SyncVerb::advance, 0, 0, 0, {{0, 0}});
  CHECK(done.size() == 1 && done[0].reply.status.ok() && done[0].reply.step == 1);
}

TEST(what_is_no_sync_shard_is_refused) {
  Job job;
  const std::vector<std::byte> image = halfway().shard.encode();
  for (size_t bytes = 0; bytes < image.size(); ++bytes)
    CHECK(!job.shard.decode(std::span(image).first(bytes)));
  CHECK(SyncShard().decode(SyncShard().encode()));  // of a store in which nobody trained
}
