// The sync shard's promises, told as scripts: who asks what, and who is answered by it.
#include "store/sync_shard.h"

#include <cmath>
#include <cstdio>
#include <map>
#include <string>

#include "check.h"

using namespace shoal;

namespace {

struct Job {
  SyncShard shard;
  SyncConfig config;
  uint64_t tokens = 0;
  double now = 0.0;
  uint64_t applied = 0;
  std::map<uint64_t, SyncReply> replies;  // by token

  explicit Job(SyncConfig c, bool open = true) : config(c) {
    for (uint32_t rank = 0; open && rank < config.workers; ++rank)
      CHECK(get(ask(SyncVerb::open, rank)).status.ok());
  }

  uint64_t send(SyncRequest request) {
    now += 1.0;
    for (SyncShard::Answer& answer : shard.handle(request, ++tokens, now)) {
      CHECK(replies.emplace(answer.token, std::move(answer.reply)).second);  // each is answered once
    }
    return tokens;
  }
  SyncRequest make(SyncVerb verb, uint32_t rank, uint64_t step = 0, float weight = 1.0f) {
    SyncRequest request;
    request.verb = verb;
    request.rank = rank;
    request.step = step;
    request.weight = weight;
    request.lr = static_cast<float>(rank);
    request.config = config;
    request.applied = applied;
    request.number = tokens + 1;
    request.client = 100 + rank;
    return request;
  }
  uint64_t ask(SyncVerb verb, uint32_t rank, uint64_t step = 0, float weight = 1.0f) {
    return send(make(verb, rank, step, weight));
  }
  uint64_t finish(uint32_t rank, uint64_t step, float weight = 1.0f) {
    return ask(SyncVerb::advance, rank, step, weight);
  }
  bool waits(uint64_t token) const { return !replies.contains(token); }
  const SyncReply& get(uint64_t token) {
    CHECK(replies.contains(token));
    return replies[token];
  }
  uint64_t epoch_ask(SyncVerb verb, uint32_t rank, uint64_t epoch, uint64_t count = 0) {
    SyncRequest request = make(verb, rank);
    request.epoch = epoch;
    request.count = count;
    return send(request);
  }
};

// "0:3=0.5 1:3=0.5": rank:step=weight.
std::string text(const Commit& commit) {
  std::string all;
  for (const CommitEntry& entry : commit.entries) {
    char one[64];
    std::snprintf(one, sizeof one, "%s%u:%llu=%g", all.empty() ? "" : " ", entry.rank,
                  static_cast<unsigned long long>(entry.step), static_cast<double>(entry.weight));
    all += one;
  }
  return all;
}

}  // namespace

TEST(the_number_that_closes_a_round_follows_from_the_quorum_and_who_is_present) {
  struct Case {
    uint32_t workers;
    double quorum;
    uint32_t left;
    uint32_t closes_at;
  };
  for (const Case& c : {Case{1, 1.0, 0, 1}, Case{4, 1.0, 0, 4}, Case{4, 1.0, 1, 3}, Case{10, 0.9, 0, 9},
                        Case{9, 0.9, 0, 9}, Case{10, 0.1, 0, 1}, Case{5, 0.6, 2, 2}, Case{3, 0.5, 0, 2}}) {
    Job job({.workers = c.workers, .take = Take::round, .quorum = c.quorum});
    for (uint32_t i = 0; i < c.left; ++i) job.ask(SyncVerb::leave, c.workers - 1 - i);
    for (uint32_t i = 0; i + 1 < c.closes_at; ++i) CHECK(job.waits(job.finish(i, 0)));
    CHECK(!job.waits(job.finish(c.closes_at - 1, 0)));
    CHECK_EQ(job.replies.rbegin()->second.closed, 1);
  }
}

TEST(how_far_a_worker_may_run_ahead_follows_from_the_slack) {
  for (const int32_t slack : {-1, 0, 1, 3}) {
    Job job({.workers = 2, .take = Take::each, .slack = slack});
    uint64_t step = 0;
    while (step < 10 && !job.waits(job.finish(0, step))) ++step;
    CHECK_EQ(step, slack < 0 ? 10 : static_cast<uint64_t>(slack));
    if (slack < 0) continue;
    const uint64_t waiting = job.tokens;
    CHECK(!job.waits(job.finish(1, 0)));
    CHECK_EQ(job.get(waiting).step, step + 1);
    CHECK(job.get(waiting).commits.empty());
  }
}

TEST(a_commit_lists_its_entries_by_rank_with_their_part_of_the_samples) {
  Job job({.workers = 3, .take = Take::round});
  job.finish(2, 0, 6.0f);
  job.finish(0, 0, 2.0f);
  job.finish(1, 0, 0.0f);
  const Commit& commit = job.get(job.tokens).commits.at(0);
  CHECK_EQ(text(commit), "0:0=0.25 1:0=-1 2:0=0.75");
  CHECK_EQ(commit.lr, 0.0f);
  job.applied = 1;
  job.finish(1, 1, 4.0f);
  job.finish(0, 1, 0.0f);
  job.finish(2, 1, 4.0f);
  REQUIRE(job.get(job.tokens).commits.size() == 1);
  CHECK_EQ(text(job.get(job.tokens).commits[0]), "0:1=-1 1:1=0.5 2:1=0.5");
  CHECK_EQ(job.get(job.tokens).commits[0].lr, 1.0f);  // of the lowest rank that is in it
}

TEST(commits_are_handed_out_until_somebody_says_that_they_are_done) {
  Job job({.workers = 1, .take = Take::round});
  CHECK_EQ(job.get(job.finish(0, 0)).commits.size(), 1);
  CHECK_EQ(job.get(job.finish(0, 1)).commits.size(), 2);
  job.applied = 2;
  CHECK_EQ(job.get(job.finish(0, 2)).commits.at(0).seq, 3);
}

TEST(finishing_again_changes_nothing_and_is_answered_alike) {
  Job job({.workers = 2, .take = Take::round, .quorum = 0.5});
  CHECK_EQ(job.get(job.finish(0, 0)).step, 1);
  for (int again = 0; again < 3; ++again) {
    CHECK_EQ(job.get(job.finish(0, 0)).step, 1);
    CHECK_EQ(job.get(job.tokens).closed, 1);
  }
  for (int again = 0; again < 3; ++again) {
    const SyncReply& late = job.get(job.finish(1, 0));
    CHECK(late.dropped && late.step == 1 && late.closed == 1);
  }
  CHECK_EQ(job.get(job.ask(SyncVerb::state, 0)).numbers[0], 1);  // dropped once
  const SyncReply& next = job.get(job.finish(1, 1));
  CHECK(!next.dropped);
  CHECK_EQ(text(next.commits.back()), "1:1=1 1:0=-1");
}

TEST(all_who_asked_the_same_are_answered_together) {
  Job job({.workers = 2, .take = Take::round});
  const uint64_t older = job.finish(0, 0);
  const uint64_t newer = job.finish(0, 0);
  CHECK(job.waits(older) && job.waits(newer));
  for (int i = 0; i < 15; ++i) job.finish(0, 0);
  CHECK(job.get(older).status.code() == Code::unavailable);  // but not without end
  job.finish(1, 0);
  CHECK_EQ(job.get(newer).step, 1);
}

TEST(a_newer_question_takes_the_place_of_an_older_one) {
  Job job({.workers = 2, .take = Take::round});
  const uint64_t finishing = job.finish(0, 0);
  const uint64_t ending = job.epoch_ask(SyncVerb::pass_end, 0, 0);
  CHECK(job.get(finishing).status.code() == Code::unavailable);
  CHECK(job.waits(ending));
}

TEST(what_arrives_after_a_newer_question_changes_nothing) {
  Job job({.workers = 2, .take = Take::round});
  SyncRequest first = job.make(SyncVerb::advance, 0, 0);
  first.number = 1000;
  job.send(first);
  job.finish(1, 0);
  SyncRequest second = job.make(SyncVerb::advance, 0, 1);
  second.number = 1001;
  const uint64_t waiting = job.send(second);
  CHECK(job.get(job.send(first)).status.code() == Code::unavailable);
  CHECK(job.waits(waiting));
  job.finish(1, 1);
  CHECK_EQ(job.get(waiting).step, 2);
}

TEST(contributions_are_counted_in_order_of_finishing) {
  Job job({.workers = 2, .take = Take::count, .count = 3});
  CHECK_EQ(job.get(job.finish(1, 0)).closed, 0);
  CHECK_EQ(job.get(job.finish(1, 1, 0.0f)).closed, 0);  // abstains
  CHECK_EQ(job.get(job.finish(1, 2)).closed, 0);
  const SyncReply& third = job.get(job.finish(0, 0, 2.0f));
  CHECK_EQ(third.step, 1);
  CHECK_EQ(text(third.commits.at(0)), "0:0=2 1:0=1 1:1=-1 1:2=1");
  job.finish(0, 1);
  job.applied = 1;
  const uint64_t first = job.epoch_ask(SyncVerb::pass_end, 0, 0);
  CHECK(job.waits(first));
  job.epoch_ask(SyncVerb::pass_end, 1, 0);
  CHECK_EQ(text(job.get(first).commits.at(0)), "0:1=1");
  CHECK_EQ(job.get(first).step, job.get(job.tokens).step);  // clocks are equal again
}

TEST(a_pass_ends_when_all_is_done_and_all_are_there) {
  Job job({.workers = 3, .take = Take::each, .slack = 0});
  job.epoch_ask(SyncVerb::ledger_open, 0, 7, 4);
  CHECK(job.get(job.epoch_ask(SyncVerb::lease, 0, 7, 3)).numbers == (std::vector<uint64_t>{0, 3}));
  CHECK(job.get(job.epoch_ask(SyncVerb::lease, 1, 7, 3)).numbers == (std::vector<uint64_t>{3, 4}));
  const uint64_t third = job.epoch_ask(SyncVerb::pass_end, 2, 7);
  CHECK(job.waits(third));
  SyncRequest done = job.make(SyncVerb::advance, 0);
  done.units = {{7, 0}, {7, 1}, {7, 99}, {8, 0}};
  job.send(done);
  job.ask(SyncVerb::leave, 0);  // unit 2 comes back
  CHECK(job.get(third).again);
  CHECK(job.get(job.epoch_ask(SyncVerb::lease, 2, 7, 9)).numbers == (std::vector<uint64_t>{2, 3}));
  done = job.make(SyncVerb::advance, 1);
  done.units = {{7, 3}};
  job.send(done);
  const uint64_t second = job.epoch_ask(SyncVerb::pass_end, 1, 7);
  done = job.make(SyncVerb::advance, 2);
  done.units = {{7, 2}};
  job.send(done);
  CHECK(job.waits(second));
  const uint64_t last = job.epoch_ask(SyncVerb::pass_end, 2, 7);
  CHECK(!job.get(second).again && !job.get(last).again);
  CHECK(!job.get(job.epoch_ask(SyncVerb::pass_end, 1, 7)).again);  // asked again: it is over
  CHECK(job.get(job.epoch_ask(SyncVerb::report, 1, 7)).numbers ==
        (std::vector<uint64_t>{4, 4, 2, 1, 1, 0, 4}));
}

TEST(workers_at_different_ends_are_let_go_in_order) {
  Job job({.workers = 2, .take = Take::each});
  const uint64_t later = job.epoch_ask(SyncVerb::pass_end, 0, 8);
  const uint64_t earlier = job.epoch_ask(SyncVerb::pass_end, 1, 7);
  CHECK(job.waits(later) && !job.waits(earlier));  // rank 1 works again, and is waited for
  job.epoch_ask(SyncVerb::pass_end, 1, 8);
  CHECK(!job.waits(later));
}

TEST(units_of_a_dropped_contribution_come_back) {
  Job job({.workers = 2, .take = Take::round, .quorum = 0.5});
  job.epoch_ask(SyncVerb::ledger_open, 0, 0, 2);
  job.epoch_ask(SyncVerb::lease, 0, 0, 1);
  job.epoch_ask(SyncVerb::lease, 1, 0, 1);
  for (const uint32_t rank : {0u, 1u}) {
    SyncRequest done = job.make(SyncVerb::advance, rank);
    done.units = {{0, rank}};
    job.send(done);
  }
  CHECK(job.get(job.tokens).dropped);
  CHECK(job.get(job.epoch_ask(SyncVerb::lease, 0, 0, 9)).numbers == (std::vector<uint64_t>{1, 2}));
}

TEST(another_life_of_a_rank_begins_where_the_clock_stands) {
  Job job({.workers = 2, .take = Take::round});
  job.epoch_ask(SyncVerb::ledger_open, 0, 0, 2);
  job.epoch_ask(SyncVerb::lease, 1, 0, 2);
  job.finish(1, 0);
  SyncRequest again = job.make(SyncVerb::open, 1);
  again.client = 500;
  const uint64_t reopened = job.send(again);
  CHECK(job.waits(reopened));  // its round is still open, and it has finished it
  CHECK(job.get(job.epoch_ask(SyncVerb::lease, 0, 0, 9)).numbers == (std::vector<uint64_t>{0, 2}));
  job.finish(0, 0);
  CHECK_EQ(job.get(reopened).step, 1);
  CHECK_EQ(job.get(reopened).commits.at(0).entries[1].client, 101);
}

TEST(a_newer_life_evicts_an_older_one_and_a_late_word_changes_nothing) {
  Job job({.workers = 2, .take = Take::round});
  job.epoch_ask(SyncVerb::ledger_open, 0, 0, 2);
  job.epoch_ask(SyncVerb::lease, 1, 0, 2);
  const uint64_t waiting = job.finish(0, 0);
  SyncRequest evict = job.make(SyncVerb::leave, 1);
  evict.incarnation = 1;
  job.send(evict);
  CHECK_EQ(job.get(waiting).step, 1);  // the round is closed without it
  CHECK_EQ(text(job.get(waiting).commits.at(0)), "0:0=1 1:0=-1");
  CHECK(job.get(job.finish(1, 0)).status.code() == Code::fenced);
  CHECK(job.get(job.epoch_ask(SyncVerb::lease, 0, 0, 9)).numbers == (std::vector<uint64_t>{0, 2}));
  SyncRequest next = job.make(SyncVerb::open, 1);
  next.incarnation = 2;
  CHECK_EQ(job.get(job.send(next)).step, 1);
  job.send(evict);  // again, and too late
  CHECK(job.waits(job.finish(0, 1)));
}

TEST(an_evicted_worker_is_still_to_come) {
  Job job({.workers = 1, .take = Take::round});
  job.finish(0, 0);
  SyncRequest evict = job.make(SyncVerb::leave, 0);
  evict.incarnation = 1;
  job.send(evict);
  SyncRequest next = job.make(SyncVerb::open, 0);
  next.incarnation = 2;
  CHECK_EQ(job.get(job.send(next)).step, 1);  // the same job, though nobody was left
}

TEST(the_part_of_one_that_is_away_is_done_by_the_rest_also_in_later_passes) {
  Job job({.workers = 2, .take = Take::round});
  const auto open_static = [&](uint64_t epoch) {
    SyncRequest open = job.make(SyncVerb::ledger_open, 0, kStatic);
    open.epoch = epoch;
    open.count = 4;
    CHECK_EQ(job.get(job.send(open)).step, 2);
  };
  open_static(0);
  SyncRequest evict = job.make(SyncVerb::leave, 1, kAway);
  evict.incarnation = 1;
  job.send(evict);
  open_static(1);
  CHECK(job.get(job.epoch_ask(SyncVerb::lease, 0, 0, 1)).numbers == (std::vector<uint64_t>{1, 2}));
  CHECK(job.get(job.epoch_ask(SyncVerb::lease, 0, 1, 9)).numbers == (std::vector<uint64_t>{1, 2, 3, 4}));
  SyncRequest back = job.make(SyncVerb::open, 1);
  back.incarnation = 2;
  job.send(back);
  SyncRequest resume = job.make(SyncVerb::resume, 1);  // what others have, or may take, is not its own
  CHECK(job.get(job.send(resume)).numbers == (std::vector<uint64_t>{1, 3}));
  SyncRequest lease = job.make(SyncVerb::lease, 1);
  lease.incarnation = 2;
  lease.count = 9;
  CHECK(job.get(job.send(lease)).numbers == (std::vector<uint64_t>{3, 4}));
}

TEST(what_is_overdue_is_taken_from_its_holder_and_both_uses_count) {
  Job job({.workers = 2});
  job.epoch_ask(SyncVerb::ledger_open, 0, 0, 2);
  job.epoch_ask(SyncVerb::lease, 1, 0, 1);
  const auto overdue = [&] {
    SyncRequest lease = job.make(SyncVerb::lease, 0, kOverdue);
    lease.count = 9;
    return job.get(job.send(lease)).numbers;
  };
  CHECK(overdue() == (std::vector<uint64_t>{1, 2}));  // what nobody has comes first
  CHECK(overdue() == (std::vector<uint64_t>{0, 1}));
  CHECK(overdue().empty());                                    // it has all itself
  SyncRequest third = job.make(SyncVerb::lease, 1, kOverdue);  // of what was taken over nobody takes again
  third.count = 9;
  CHECK(job.get(job.send(third)).numbers == (std::vector<uint64_t>{1, 2}));
  for (const uint32_t rank : {1u, 0u}) {
    SyncRequest done = job.make(SyncVerb::advance, rank, 0);
    done.units = {{0, 0}};
    job.send(done);
  }
  SyncRequest report = job.make(SyncVerb::report, 0);  // units, done; by rank; used 0, 1 and 2 times
  CHECK(job.get(job.send(report)).numbers == (std::vector<uint64_t>{2, 1, 1, 1, 1, 0, 1}));
}

TEST(who_comes_late_hears_what_is_over_and_what_is_done) {
  Job job({.workers = 2, .take = Take::round});
  for (const uint64_t epoch : {0, 1}) {
    SyncRequest open = job.make(SyncVerb::ledger_open, 0, kSplit | kStatic);
    open.epoch = epoch;
    open.count = 3;
    CHECK_EQ(job.get(job.send(open)).step, 2);
    for (const uint32_t rank : {0u, 1u}) {
      SyncRequest done = job.make(SyncVerb::advance, rank, epoch);
      done.units = {{epoch, rank}, {epoch, 2 + rank}};
      if (epoch == 0) done.units.push_back({epoch, 4 + rank});
      job.send(done);
    }
    for (const uint32_t rank : {0u, 1u}) job.epoch_ask(SyncVerb::pass_end, rank, epoch);
  }
  const SyncReply late = job.get(job.epoch_ask(SyncVerb::resume, 1, 0));
  CHECK_EQ(late.step, 1);
  CHECK(late.numbers == (std::vector<uint64_t>{1, 3}));
  CHECK_EQ(job.get(job.epoch_ask(SyncVerb::resume, 1, 7)).step, 7);
}

TEST(a_job_goes_on_with_more_workers_or_fewer) {
  Job job({.workers = 2, .take = Take::round});
  SyncRequest open = job.make(SyncVerb::ledger_open, 0, kSplit | kStatic);
  open.count = 1;
  job.send(open);
  job.config.workers = 3;
  CHECK(job.get(job.ask(SyncVerb::resize, 0)).status.ok());
  CHECK(job.waits(job.finish(0, 0)));
  CHECK(!job.waits(job.finish(1, 0)));  // rank 2 is to come, and not waited for
  CHECK_EQ(job.get(job.ask(SyncVerb::open, 2)).step, 1);
  CHECK(job.waits(job.finish(0, 1)) && job.waits(job.finish(1, 1)) && !job.waits(job.finish(2, 1)));
  CHECK_EQ(job.get(job.send(open)).step, 2);  // the pass is cut as it was
  open.epoch = 1;
  CHECK_EQ(job.get(job.send(open)).step, 3);
  job.config.workers = 1;
  job.ask(SyncVerb::resize, 0);
  CHECK(job.waits(job.finish(0, 2)));  // they go on until they leave
  for (const uint32_t rank : {1u, 2u}) job.ask(SyncVerb::leave, rank);
  CHECK(!job.waits(job.tokens - 2));
  CHECK(job.get(job.epoch_ask(SyncVerb::lease, 0, 1, 9)).numbers == (std::vector<uint64_t>{1, 3}));
  job.config.take = Take::each;
  CHECK(job.get(job.ask(SyncVerb::resize, 0)).status.code() == Code::mismatch);
}

TEST(barriers_do_not_push_out_the_pass_that_runs) {
  Job job({.workers = 1, .take = Take::each});
  job.epoch_ask(SyncVerb::ledger_open, 0, 0, 2);
  job.epoch_ask(SyncVerb::lease, 0, 0, 1);
  for (uint64_t barrier = 100; barrier < 200; ++barrier)
    CHECK(!job.waits(job.epoch_ask(SyncVerb::pass_end, 0, barrier)));
  CHECK(job.get(job.epoch_ask(SyncVerb::lease, 0, 0, 9)).numbers == (std::vector<uint64_t>{1, 2}));
}

TEST(what_was_finished_is_committed_when_the_last_one_leaves) {
  Job job({.workers = 1, .take = Take::count, .count = 5});
  job.finish(0, 0);
  const SyncReply last = job.get(job.ask(SyncVerb::leave, 0));
  CHECK_EQ(text(last.commits.at(0)), "0:0=1 0:1=-1");
  CHECK_EQ(text(job.get(job.ask(SyncVerb::open, 0)).commits.at(0)), "0:0=1 0:1=-1");  // it may have died
}

TEST(the_last_one_to_leave_carries_what_shall_be_forgotten) {
  Job job({.workers = 2, .take = Take::round, .quorum = 0.5});
  job.finish(0, 0);
  job.finish(1, 0);  // too late: dropped
  CHECK_EQ(job.get(job.ask(SyncVerb::leave, 0)).commits.size(), 1);
  const SyncReply last = job.get(job.ask(SyncVerb::leave, 1));
  CHECK_EQ(text(last.commits.at(1)), "1:0=-1 0:1=-1 1:1=-1");
}

TEST(a_job_that_all_have_left_gives_way_to_the_next) {
  Job job({.workers = 1, .take = Take::round});
  job.finish(0, 0);
  job.config.workers = 2;
  CHECK(job.get(job.ask(SyncVerb::open, 0)).status.code() == Code::mismatch);
  job.ask(SyncVerb::leave, 0);
  CHECK_EQ(job.get(job.ask(SyncVerb::open, 1)).step, 0);
  CHECK(job.waits(job.finish(1, 0)));
  CHECK_EQ(job.get(job.ask(SyncVerb::state, 0)).closed, 2);  // commits go on
}

TEST(passes_that_were_left_before_their_end_are_nobodys_in_the_next_job_and_forgotten_in_time) {
  Job job({.workers = 1, .take = Take::each});
  for (uint64_t epoch = 0; epoch < 100; ++epoch) {
    job.epoch_ask(SyncVerb::ledger_open, 0, epoch, 2);
    job.epoch_ask(SyncVerb::lease, 0, epoch, 1);
    SyncRequest half = job.make(SyncVerb::advance, 0, epoch);
    half.units = {{epoch, 0}};
    job.send(half);
  }
  const uint64_t next = job.get(job.epoch_ask(SyncVerb::resume, 0, 0)).step;
  CHECK(next > 50 && next < 99);  // the latest are still known
  CHECK_EQ(job.get(job.epoch_ask(SyncVerb::report, 0, 0)).numbers[0], 0);
  CHECK_EQ(job.get(job.epoch_ask(SyncVerb::report, 0, 99)).numbers[0], 2);
  job.ask(SyncVerb::leave, 0);
  job.config.take = Take::round;
  CHECK_EQ(job.get(job.ask(SyncVerb::open, 0)).step, 0);
  CHECK_EQ(job.get(job.epoch_ask(SyncVerb::resume, 0, 0)).step, 0);
}

TEST(a_worker_comes_back_without_holding_the_others_up) {
  Job job({.workers = 2, .take = Take::each, .slack = 1});
  job.ask(SyncVerb::leave, 1);
  for (uint64_t step = 0; step < 10; ++step) CHECK(!job.waits(job.finish(0, step)));
  CHECK_EQ(job.get(job.ask(SyncVerb::open, 1)).step, 10);
  CHECK(!job.waits(job.finish(0, 10)));
  CHECK(job.waits(job.finish(0, 11)));
}

TEST(what_makes_no_sense_is_refused) {
  Job nobody({.workers = 1}, false);
  CHECK(nobody.get(nobody.finish(0, 0)).status.code() == Code::bad_input);
  for (const SyncConfig bad : {SyncConfig{.workers = 0}, SyncConfig{.workers = 1, .quorum = 0.0},
                               SyncConfig{.workers = 1, .quorum = NAN}, SyncConfig{.workers = 1, .count = 0},
                               SyncConfig{.workers = kWorkersMax + 1}}) {
    Job job(bad, false);
    CHECK(job.get(job.ask(SyncVerb::open, 0)).status.code() == Code::bad_input);
  }
  Job job({.workers = 1, .take = Take::round});
  CHECK(job.get(job.finish(1, 0)).status.code() == Code::bad_input);       // no such rank
  CHECK(job.get(job.finish(0, 5)).status.code() == Code::bad_input);       // not an open round
  CHECK(job.get(job.finish(0, 0, NAN)).status.code() == Code::bad_input);  // not a weight
  CHECK(job.get(job.epoch_ask(SyncVerb::ledger_open, 0, 0, kUnitsMax + 1)).status.code() == Code::bad_input);
}

TEST(messages_survive_the_wire_and_cut_ones_are_refused) {
  SyncRequest request;
  request.verb = SyncVerb::advance;
  request.step = 7;
  request.units = {{1, 2}, {3, 4}};
  const auto bytes = encode_sync(request);
  CHECK_EQ(decode_sync(bytes)->units[1].unit, 4);
  for (size_t n = 0; n < bytes.size(); ++n) CHECK(!decode_sync(std::span(bytes).first(n)));
  SyncReply reply;
  reply.numbers = {1, 2, 3};
  reply.commits.push_back({.seq = 9, .entries = {{.step = 4, .rank = 1, .weight = 0.5f}}});
  const auto back = encode_sync_reply(reply);
  CHECK_EQ(text(decode_sync_reply(back)->commits.at(0)), "1:4=0.5");
  for (size_t n = 0; n < back.size(); ++n) CHECK(!decode_sync_reply(std::span(back).first(n)));
}
