#include "store/sync_shard.h"

#include <algorithm>
#include <cmath>

#include "base/mutants.h"

namespace shoal {
namespace {

constexpr size_t kTokensMax = 16;  // of one question

std::string describe(const SyncConfig& config) {
  const char* take = config.take == Take::each ? "each" : config.take == Take::round ? "round" : "count";
  return "workers=" + std::to_string(config.workers) + " take=" + take +
         " quorum=" + std::to_string(config.quorum) + " count=" + std::to_string(config.count) +
         " slack=" + std::to_string(config.slack);
}

bool same_but_size(const SyncConfig& one, SyncConfig other) {
  other.workers = one.workers;
  other.quorum = one.quorum;
  return other == one;
}

Status check_config(const SyncConfig& config) {
  const bool sound = config.workers >= 1 && config.workers <= kWorkersMax && config.take <= Take::count &&
                     config.quorum > 0.0 && config.quorum <= 1.0 && config.count >= 1;
  if (sound) return {};
  return {Code::bad_input, describe(config) + ": workers is 1.." + std::to_string(kWorkersMax) +
                               ", quorum in (0, 1], count at least 1"};
}

}  // namespace

// A worker of the job that comes back, or that was started before the job changed its size, and may not have
// heard that there are more or fewer by now.
bool SyncShard::knows(const SyncRequest& request) const {
  if (request.step != kBack || all_left() || request.rank >= members_.size()) return false;
  const Member& member = members_[request.rank];
  const bool never_came = SHOAL_MUTANT(newcomer_unknown) ? member.phase == Phase::absent : member.client == 0;
  return never_came ? request.rank < config_.workers : member.client == request.client;
}

Status SyncShard::check(const SyncRequest& request) const {
  if (request.verb == SyncVerb::open || request.verb == SyncVerb::resize) {
    if (Status status = check_config(request.config); !status.ok()) return status;
  } else if (members_.empty() && request.verb == SyncVerb::leave) {
    return {};  // there is nobody to be evicted
  } else if (members_.empty()) {
    return {Code::bad_input, "no job has opened its sync here: call sync_open first"};
  }
  // Who is to go, since the job has become smaller, may still finish a step.
  const bool joins = request.verb == SyncVerb::open && !knows(request);
  const size_t workers = joins ? request.config.workers : members_.size();
  if (request.rank >= workers) {
    return {Code::bad_input, "rank " + std::to_string(request.rank) +
                                 " is not below the number of workers, " + std::to_string(workers)};
  }
  if (!std::isfinite(request.weight) || request.weight < 0.0f || !(request.clip >= 0.0f))
    return {Code::bad_input, "weight and clip are numbers >= 0"};
  const bool acts = request.verb == SyncVerb::advance || request.verb == SyncVerb::lease ||
                    request.verb == SyncVerb::pass_end || request.verb == SyncVerb::keep;
  if (const Member* member = acts ? &members_[request.rank] : nullptr;
      member != nullptr && member->phase != Phase::absent &&
      (member->client != request.client || member->incarnation != request.incarnation)) {
    return {Code::fenced, "rank " + std::to_string(request.rank) + " has another life: this one is over"};
  }
  return {};
}

std::vector<SyncShard::Answer> SyncShard::handle(const SyncRequest& request, uint64_t token, double now) {
  now_ = now;
  while (!commits_.empty() && commits_.front().seq <= request.applied) commits_.pop_front();
  Status status = check(request);
  SyncReply reply;
  if (status.ok() && is_stale(request)) status = {Code::unavailable, "its rank has asked something newer"};
  if (status.ok()) {
    switch (request.verb) {
      case SyncVerb::open: status = open(request); break;
      case SyncVerb::advance: status = advance(request); break;
      case SyncVerb::state: reply.numbers = state(); break;
      case SyncVerb::ledger_open: status = ledger_open(request, reply); break;
      case SyncVerb::resize: status = resize(request); break;
      case SyncVerb::lease:
        if (const auto it = passes_.find(request.epoch); it != passes_.end())
          for (const auto& [begin, end] :
               it->second.ledger.lease(request.rank, request.count, request.step == kOverdue))
            reply.numbers.insert(reply.numbers.end(), {begin, end});
        break;
      case SyncVerb::keep:
        if (const auto it = passes_.find(request.epoch); it != passes_.end())
          for (const UnitName& name : request.units)
            if (it->second.ledger.keep(request.rank, name.unit)) reply.numbers.push_back(name.unit);
        break;
      case SyncVerb::pass_end: pass_end(request); break;
      case SyncVerb::leave: leave(request); break;
      case SyncVerb::report: {
        const auto it = passes_.find(request.epoch);
        const WorkLedger none(0, config_.workers);
        const WorkLedger& ledger = it == passes_.end() ? none : it->second.ledger;
        reply.numbers = ledger.report();
        reply.step = ledger.ranks();  // how many of the numbers are by rank
        break;
      }
      case SyncVerb::resume:
        reply.step = next_pass(request.epoch);
        if (const auto it = passes_.find(reply.step); it != passes_.end())
          reply.numbers = it->second.ledger.done_of(request.rank);
        break;
      default: status = {Code::refused, "a sync request of an unknown kind"};
    }
  }
  const bool waits = request.verb == SyncVerb::open || request.verb == SyncVerb::advance ||
                     request.verb == SyncVerb::pass_end;
  const bool parked = waits && status.ok();
  reply.status = status;
  if (parked) park(request, token);
  settle();
  if (!parked) answer(token, std::move(reply));  // last: it carries the commit that it has caused
  return std::exchange(ready_, {});
}

Status SyncShard::open(const SyncRequest& request) {
  if (all_left()) {  // the first of this job; commits go on counting, for the shards do
    config_ = request.config;
    members_.assign(config_.workers, Member{.since = now_});
    round_ = 0;
    passes_.clear();
    over_.clear();
    several_steps_ = false;
  } else if (restored_ && config_ != request.config) {
    go_on_with(request.config);
  } else if (config_ != request.config && !(knows(request) && same_but_size(config_, request.config))) {
    return {Code::mismatch, "this job's sync was opened with " + describe(config_) + ", rank " +
                                std::to_string(request.rank) + " asks for " + describe(request.config)};
  }
  restored_ = false;
  Member& member = members_[request.rank];
  const bool another = member.client != request.client || member.incarnation != request.incarnation;
  if (another && member.phase != Phase::absent) depart(request.rank, Phase::gone);
  const bool back = member.phase == Phase::left || member.phase == Phase::gone || member.phase == Phase::away;
  if (back && config_.take != Take::round) {
    // The step that it broke off has a number that was used; and nobody shall wait until it has caught up.
    uint64_t slowest = UINT64_MAX;
    for (const Member& other : members_)
      if (counts(other)) slowest = std::min(slowest, other.finished);
    member.finished = std::max(member.finished + 1, slowest == UINT64_MAX ? 0 : slowest);
  }
  member.client = request.client;
  member.incarnation = request.incarnation;
  member.to_come = false;
  enter(member, Phase::working);
  return {};
}

SyncShard::Contribution SyncShard::contribution(const SyncRequest& request, float weight) const {
  return {.entry = {.client = request.client,
                    .step = request.step,
                    .incarnation = request.incarnation,
                    .rank = request.rank,
                    .weight = weight},
          .lr = request.lr,
          .clip = request.clip};
}

Status SyncShard::advance(const SyncRequest& request) {
  Member& member = members_[request.rank];
  const bool rounds = config_.take == Take::round;
  if (rounds && request.step > round_) {
    return {Code::bad_input, "rank " + std::to_string(request.rank) + " finished step " +
                                 std::to_string(request.step) + ", and the open round is that of step " +
                                 std::to_string(round_)};
  }
  if (member.phase == Phase::left || member.phase == Phase::absent) {
    return {Code::closed,
            "rank " + std::to_string(request.rank) + " has left, or never was here: call sync_open first"};
  }
  enter(member, Phase::working);
  if (request.step < member.finished && !SHOAL_MUTANT(count_requests)) return {};  // asked again
  member.finished = request.step + 1;
  member.named = request.units;
  several_steps_ |= request.units.empty() && request.weight > 0.0f;
  const bool late = rounds && request.step < round_;
  for (const UnitName& name : request.units) {
    const auto it = passes_.find(name.epoch);
    if (it == passes_.end()) continue;
    member.epoch = name.epoch;
    late ? it->second.ledger.give_back(request.rank, name.unit)
         : it->second.ledger.done(request.rank, name.unit);
  }
  if (late) {
    ++dropped_;
    member.dropped_next = request.step + 1;
    forgotten_.push_back(contribution(request, kDropped).entry);
  } else if (config_.take != Take::each) {
    contributions_.push_back(contribution(request, request.weight));
  }
  return {};
}

// New ranks are to come, and nobody waits for them; those that are too many go on until they leave, also
// where the job has grown again before they did.
Status SyncShard::resize(const SyncRequest& request) {
  if (!same_but_size(config_, request.config)) {
    return {Code::mismatch,
            "this job's sync is " + describe(config_) + "; it cannot become " + describe(request.config)};
  }
  const uint32_t before = config_.workers;
  config_ = request.config;
  if (members_.size() < config_.workers) members_.resize(config_.workers);
  for (uint32_t rank = before; rank < config_.workers; ++rank) {
    const Phase phase = members_[rank].phase;
    const bool here = phase == Phase::working || phase == Phase::waiting || phase == Phase::at_end;
    if (!here || SHOAL_MUTANT(grown_over)) enter(members_[rank], Phase::gone);
    members_[rank].to_come = true;
  }
  for (size_t rank = config_.workers; rank < members_.size(); ++rank) {
    Phase& phase = members_[rank].phase;
    if (phase == Phase::gone || phase == Phase::away || phase == Phase::absent)
      depart(static_cast<uint32_t>(rank), phase);
  }
  return {};
}

void SyncShard::pass_end(const SyncRequest& request) {
  Member& member = members_[request.rank];
  member.epoch = request.epoch;
  // It goes on at once, as it was told before, and no round must close as if it were at an end.
  if (is_over(request.epoch)) return;
  // What it holds and knows nothing of: the answer to its lease was lost.
  WorkLedger& ledger = pass(request.epoch).ledger;
  ledger.give_back_all(request.rank);
  const bool goes_on = has_more(ledger, request.step) && !SHOAL_MUTANT(ends_again);
  enter(member, goes_on ? Phase::working : Phase::at_end);
}

void SyncShard::leave(const SyncRequest& request) {
  if (members_.empty()) return;
  Member& member = members_[request.rank];
  const bool never_came = member.phase == Phase::absent;
  const bool late = member.client != request.client || member.incarnation > request.incarnation;
  if (late && !never_came) return;
  const bool itself = member.client == request.client && member.incarnation == request.incarnation;
  depart(request.rank, itself ? Phase::left : request.step == kAway ? Phase::away : Phase::gone);
  member.client = request.client;
  member.incarnation = request.incarnation;
}

// Its life is over: what it has not finished counts nowhere, and what it held returns.
void SyncShard::depart(uint32_t rank, Phase phase) {
  Member& member = members_[rank];
  const bool for_good = rank >= config_.workers;  // the job has become smaller
  if (for_good) phase = Phase::left;
  const bool abandons = for_good || (phase == Phase::away && member.phase != Phase::left);
  for (auto& [epoch, pass] : passes_)
    if (abandons && !is_over(epoch)) pass.ledger.abandon(rank);
  if (member.phase == Phase::left) return;
  if (member.phase == Phase::gone || member.phase == Phase::away) return enter(member, phase);
  if (member.parked) turn_away(member, member.parked->tokens.size());
  member.parked.reset();
  CommitEntry rest{.client = member.client, .step = member.finished, .incarnation = member.incarnation};
  rest.rank = rank;
  rest.weight = kDropped;
  if (config_.take != Take::each) forgotten_.push_back(rest);
  if (!SHOAL_MUTANT(units_of_the_dead)) give_back(rank);
  enter(member, phase);
}

std::vector<uint64_t> SyncShard::state() const {
  std::vector<uint64_t> numbers{dropped_};
  for (const Member& member : members_) {
    numbers.push_back(member.finished);
    numbers.push_back(static_cast<uint64_t>(member.phase));
    numbers.push_back(static_cast<uint64_t>(std::max(0.0, now_ - member.since) * 1000.0));
  }
  return numbers;
}

void SyncShard::enter(Member& member, Phase phase) {
  if (member.phase != phase) member.since = now_;
  member.phase = phase;
}

void SyncShard::park(const SyncRequest& request, uint64_t token) {
  Member& member = members_[request.rank];
  if (member.parked && (member.parked->verb != request.verb || member.parked->step != request.step)) {
    turn_away(member, member.parked->tokens.size());
    member.parked.reset();
  }
  if (!member.parked) member.parked = Parked{request.verb, request.step, {}};
  std::vector<uint64_t>& tokens = member.parked->tokens;
  tokens.push_back(token);
  if (tokens.size() > kTokensMax) {
    turn_away(member, 1);
    tokens.erase(tokens.begin());
  }
  if (request.verb != SyncVerb::pass_end) enter(member, Phase::waiting);
}

// Answers the first so many that wait: somebody newer asks in their place.
void SyncShard::turn_away(const Member& member, size_t tokens) {
  for (size_t i = 0; i < tokens; ++i) {
    answer(member.parked->tokens[i],
           {.status = {Code::unavailable, "its rank has left, or has asked something newer"}});
  }
}

// A question that was overtaken by a later one of the same worker: whoever asked it has its answer.
bool SyncShard::is_stale(const SyncRequest& request) {
  if (request.verb != SyncVerb::advance && request.verb != SyncVerb::lease &&
      request.verb != SyncVerb::pass_end && request.verb != SyncVerb::open) {
    return false;
  }
  if (request.rank >= members_.size()) return false;
  Member& member = members_[request.rank];
  const bool same = member.client == request.client && member.incarnation == request.incarnation;
  if (same && request.number < member.number) return true;
  if (same || request.verb == SyncVerb::open) member.number = request.number;
  return false;
}

bool SyncShard::counts(const Member& member) const {
  return member.phase != Phase::left && member.phase != Phase::at_end && member.phase != Phase::gone &&
         member.phase != Phase::away;
}

bool SyncShard::may_start(const Member& member) const {
  if (config_.take == Take::round) return member.finished <= round_;
  if (config_.slack < 0) return true;
  return std::all_of(members_.begin(), members_.end(), [&](const Member& other) {
    return !counts(other) || other.finished + static_cast<uint64_t>(config_.slack) >= member.finished;
  });
}

bool SyncShard::all_left() const {
  return std::all_of(members_.begin(), members_.end(),
                     [](const Member& m) { return m.phase == Phase::left; });
}

void SyncShard::give_back(uint32_t rank) {
  for (auto& [epoch, pass] : passes_) pass.ledger.give_back_all(rank);
}

void SyncShard::settle() {
  while (close_round() || end_pass()) {
  }
  for (Member& member : members_)
    if (member.parked) answer_ready(member);
}

// Makes the next commit if it is due.
bool SyncShard::close_round() {
  if (contributions_.empty()) {
    // Nobody is left who would bring a commit that names what is to be forgotten: the last to leave does.
    const bool last = all_left() && !forgotten_.empty();
    if (last) make_commit(0);
    return last;
  }
  if (config_.take == Take::count) {
    size_t taken = 0;
    for (size_t i = 0; i < contributions_.size(); ++i) {
      taken += contributions_[i].entry.weight > 0.0f ? 1 : 0;
      if (taken == config_.count) {
        make_commit(i + 1);
        return true;
      }
    }
    if (!all_left()) return false;
    make_commit(contributions_.size());  // the last to leave carries it, or else the next job's first
    return true;
  }
  const auto present = std::count_if(members_.begin(), members_.end(),
                                     [this](const Member& member) { return counts(member); });
  const auto finished =
      std::count_if(contributions_.begin(), contributions_.end(),
                    [this](const Contribution& c) { return counts(members_[c.entry.rank]); });
  // The product may lie a hair above a whole number that is meant.
  if (static_cast<double>(finished) < std::ceil(config_.quorum * static_cast<double>(present) - 1e-9))
    return false;
  grow_passes();
  make_commit(contributions_.size());
  ++round_;
  return true;
}

// Of the first so many contributions.
void SyncShard::make_commit(size_t count) {
  std::vector<Contribution> taken(contributions_.begin(),
                                  contributions_.begin() + static_cast<ptrdiff_t>(count));
  contributions_.erase(contributions_.begin(), contributions_.begin() + static_cast<ptrdiff_t>(count));
  std::sort(taken.begin(), taken.end(), [](const Contribution& a, const Contribution& b) {
    return std::pair(a.entry.rank, a.entry.step) < std::pair(b.entry.rank, b.entry.step);
  });
  Commit commit{.seq = ++closed_};
  double total = 0.0;
  for (const Contribution& one : taken) total += double{one.entry.weight};
  bool first = true;
  for (Contribution& one : taken) {
    if (one.entry.weight > 0.0f) {
      if (std::exchange(first, false)) {
        commit.lr = one.lr;
        commit.clip = one.clip;
      }
      // A round is the mean of its members; of others the worker says what part of an update each is.
      if (config_.take == Take::round)
        one.entry.weight = static_cast<float>(double{one.entry.weight} / total);
    } else {
      one.entry.weight = kDropped;
    }
    commit.entries.push_back(one.entry);
  }
  commit.entries.insert(commit.entries.end(), forgotten_.begin(), forgotten_.end());
  forgotten_.clear();
  commits_.push_back(std::move(commit));
}

// Ends the pass that all present workers have come to the end of, once all of its units are done. Where they
// are at different ends the earliest goes first: whoever is let go on is then waited for by the rest.
bool SyncShard::end_pass() {
  const Member* first = nullptr;
  // Who waits for a part of a pass is not at the barriers of those who have one.
  const auto waits_for_part = [this](uint32_t rank) {
    const auto it = passes_.find(members_[rank].epoch);
    if (it == passes_.end()) return false;
    const Pass& pass = it->second;
    return !pass.ledger.cuts().empty() && rank >= pass.workers && !pass.ledger.complete();
  };
  for (uint32_t rank = 0; rank < members_.size(); ++rank) {
    const Member& member = members_[rank];
    if (counts(member)) return false;
    if (member.phase == Phase::at_end && !waits_for_part(rank) &&
        (first == nullptr || member.epoch < first->epoch))
      first = &member;
  }
  if (first == nullptr) return false;
  if (is_over(first->epoch) || !pass(first->epoch).ledger.complete()) return false;
  mark_over(first->epoch);
  if (!contributions_.empty()) make_commit(contributions_.size());
  for (const Member& member : members_) round_ = std::max(round_, member.finished);
  for (Member& member : members_) member.finished = round_;
  return true;
}

void SyncShard::answer(uint64_t token, SyncReply reply) {
  reply.closed = closed_;
  reply.commits.assign(commits_.begin(), commits_.end());
  if (SHOAL_MUTANT(commits_once)) commits_.clear();
  ready_.push_back({token, std::move(reply)});
}

void SyncShard::answer_ready(Member& member) {
  const Parked& parked = *member.parked;
  SyncReply reply;
  if (parked.verb == SyncVerb::pass_end) {
    const bool over = is_over(member.epoch);
    reply.again = !over && has_more(pass(member.epoch).ledger, parked.step);
    if (!over && !reply.again) return;
  } else if (!may_start(member)) {
    return;
  }
  enter(member, Phase::working);
  reply.numbers = {growths_};
  reply.step = config_.take == Take::round ? std::max(member.finished, round_) : member.finished;
  reply.dropped = parked.verb == SyncVerb::advance && member.dropped_next == parked.step + 1;
  for (const uint64_t token : parked.tokens) answer(token, reply);
  member.parked.reset();
}

}  // namespace shoal
