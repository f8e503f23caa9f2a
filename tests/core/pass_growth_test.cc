// A pass that runs takes in workers that came since it began: where, and who then has what.
#include <map>

#include "check.h"
#include "store/sync_shard.h"

using namespace shoal;

namespace {

using Numbers = std::vector<uint64_t>;
constexpr uint64_t kBarrier = 1000;

// A pass of four batches; each worker's units are named by their numbers.
struct Job {
  SyncShard shard;
  uint32_t workers = 2;
  uint64_t client = 1;  // + rank
  uint32_t incarnation = 0;
  uint64_t tokens = 0;
  std::map<uint64_t, SyncReply> replies = {};

  uint64_t ask(SyncVerb verb, uint32_t rank, uint64_t step = 0, uint64_t epoch = 0, Numbers units = {}) {
    SyncRequest request;
    request.verb = verb;
    request.rank = rank;
    request.step = step;
    request.epoch = epoch;
    request.count = verb == SyncVerb::lease ? 9 : 4;
    for (const uint64_t unit : units) request.units.push_back({0, unit});
    request.config = {.workers = workers, .take = Take::round};
    request.weight = 1.0f;
    request.number = ++tokens;
    request.client = client + rank;
    request.incarnation = incarnation;
    for (SyncShard::Answer& answer : shard.handle(request, tokens, 0.0))
      replies.emplace(answer.token, std::move(answer.reply));
    return tokens;
  }
  uint64_t step(uint32_t rank, uint64_t number, uint64_t unit) {
    return ask(SyncVerb::advance, rank, number, 0, {unit});
  }
  bool waits(uint64_t token) const { return !replies.contains(token); }
  Numbers cuts() { return replies[ask(SyncVerb::ledger_open, 0, kSplit | kStatic)].numbers; }
  void resize(uint32_t size) {
    workers = size;
    ask(SyncVerb::resize, 0);
  }
};

// Two workers have trained the first batch; a third has come, and waits for a part.
Job joined() {
  Job job;
  for (const uint32_t rank : {0u, 1u}) job.ask(SyncVerb::open, rank);
  job.cuts();
  for (const uint32_t rank : {0u, 1u}) job.step(rank, 0, rank);
  job.resize(3);
  job.ask(SyncVerb::open, 2);
  CHECK(job.waits(job.ask(SyncVerb::pass_end, 2)));
  return job;
}

}  // namespace

TEST(a_pass_takes_in_new_workers_where_a_round_closes) {
  Job job = joined();
  const uint64_t comes = job.tokens;
  job.step(0, 1, 2);
  CHECK(job.waits(comes));
  CHECK(job.replies[job.step(1, 1, 3)].numbers == Numbers{1});
  CHECK(job.replies[comes].again);
  CHECK_EQ(job.replies[comes].step, 2);
  CHECK((job.cuts() == Numbers{0, 2, 4, 3}));
  CHECK((job.replies[job.ask(SyncVerb::resume, 1)].numbers == Numbers{1, 3}));
  for (const uint32_t rank : {0u, 1u}) CHECK(job.waits(job.step(rank, 2, 4 + rank)));
  SyncShard copy;
  CHECK(copy.decode(job.shard.encode(true)));
  job.shard = std::move(copy);  // another server goes on with it
  CHECK_EQ(job.replies[job.step(2, 2, 6)].step, 3);
  job.resize(2);  // and what one has that leaves is for the others
  job.ask(SyncVerb::leave, 2);
  CHECK((job.replies[job.ask(SyncVerb::lease, 0)].numbers == Numbers{9, 10}));
}

TEST(who_asks_again_what_it_was_told_is_waited_for_meanwhile) {
  Job job = joined();
  job.step(0, 1, 2);
  job.step(1, 1, 3);  // the pass has grown, and the third was told so: that it did not hear
  for (const uint32_t rank : {0u, 1u}) job.step(rank, 2, 4 + rank);
  const uint64_t last = job.tokens;
  CHECK(job.replies[job.ask(SyncVerb::pass_end, 2)].again);
  CHECK(job.waits(last));
  CHECK_EQ(job.replies[job.step(2, 2, 6)].step, 3);
  CHECK(!job.waits(last));
}

TEST(a_pass_is_not_cut_for_one_that_is_still_to_come_before_others) {
  Job job;
  for (const uint32_t rank : {0u, 1u}) job.ask(SyncVerb::open, rank);
  job.resize(4);
  job.ask(SyncVerb::open, 3);
  CHECK((job.cuts() == Numbers{0, 2}));
  CHECK(job.waits(job.ask(SyncVerb::pass_end, 3)));
  CHECK(job.waits(job.step(0, 0, 0)));
  CHECK(!job.waits(job.step(1, 0, 1)));
}

TEST(who_was_too_many_and_is_still_there_when_the_job_grows_again_is_waited_for_until_it_goes) {
  Job job;
  job.workers = 3;
  for (const uint32_t rank : {0u, 1u, 2u}) job.ask(SyncVerb::open, rank);
  job.resize(1);
  job.resize(3);
  for (const uint32_t rank : {0u, 1u}) CHECK(job.waits(job.step(rank, 0, rank)));
  CHECK(!job.waits(job.step(2, 0, 2)));
  const uint64_t asked = job.step(2, 1, 5);
  CHECK(job.waits(asked));
  job.resize(1);
  job.resize(3);
  job.incarnation = 1;  // who ends it speaks for a newer life
  job.ask(SyncVerb::leave, 2, kAway);
  CHECK(job.replies[asked].status.code() == Code::unavailable);
  job.incarnation = 0;
  CHECK(job.waits(job.step(0, 1, 3)));
  CHECK(!job.waits(job.step(1, 1, 4)));
  CHECK(job.waits(job.step(0, 2, 6)));
  CHECK(!job.waits(job.step(1, 2, 7)));
}

TEST(who_waits_for_a_part_is_not_waited_for_at_barriers) {
  Job job = joined();
  const uint64_t comes = job.tokens;
  CHECK(job.waits(job.ask(SyncVerb::pass_end, 0, 0, kBarrier)));
  CHECK(!job.waits(job.ask(SyncVerb::pass_end, 1, 0, kBarrier)));
  CHECK(job.waits(comes));
}

TEST(a_pass_grows_only_when_all_who_have_a_part_are_in_the_round) {
  Job job = joined();
  job.ask(SyncVerb::pass_end, 0, 0, kBarrier);  // it may have drawn something
  job.step(1, 1, 3);
  CHECK((job.cuts() == Numbers{0, 2}));
}

TEST(a_pass_that_has_grown_goes_on_from_a_checkpoint_with_more_workers) {
  Job before = joined();
  before.step(0, 1, 2);
  before.step(1, 1, 3);
  Job job;
  job.workers = 5;
  job.client = 100;
  CHECK(job.shard.decode(before.shard.encode()));
  for (uint32_t rank = 0; rank < 5; ++rank) job.ask(SyncVerb::open, rank);
  CHECK((job.cuts() == Numbers{0, 2, 4, 3}));
  for (const uint32_t rank : {3u, 4u}) job.ask(SyncVerb::pass_end, rank, 1);
  for (const uint32_t rank : {0u, 1u, 2u}) job.step(rank, 2, 4 + rank);
  CHECK((job.cuts() == Numbers{0, 2, 4, 3, 7, 5}));
  CHECK(job.replies[job.ask(SyncVerb::report, 0)].numbers.at(0) == 12);
}

TEST(a_job_that_steps_more_than_once_with_a_batch_is_not_grown_within_a_pass) {
  Job job = joined();
  const uint64_t comes = job.tokens;
  for (const uint32_t rank : {0u, 1u}) job.ask(SyncVerb::advance, rank, 1);  // again with the first batch
  SyncShard copy;
  CHECK(copy.decode(job.shard.encode(true)));
  job.shard = std::move(copy);
  for (const uint32_t rank : {0u, 1u}) job.step(rank, 2, 2 + rank);
  CHECK(job.waits(comes));
  CHECK((job.cuts() == Numbers{0, 2}));
}

TEST(a_worker_that_comes_back_need_not_know_how_many_there_are) {
  Job job = joined();
  job.workers = 2;  // as it was told
  for (const uint32_t rank : {1u, 2u}) {
    const uint64_t back = job.ask(SyncVerb::open, rank, kBack);
    CHECK(job.waits(back) || job.replies[back].status.ok());
  }
  CHECK(job.replies[job.ask(SyncVerb::open, 1)].status.code() == Code::mismatch);  // another job must
  job.client = 100;
  CHECK(job.replies[job.ask(SyncVerb::open, 1, kBack)].status.code() == Code::mismatch);
}
