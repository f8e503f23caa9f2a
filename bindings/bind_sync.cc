// Clocks, rounds and the ledger: the questions to the sync shard, as methods of Client.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <utility>
#include <vector>

#include "py_client.h"
#include "store/sync_shard.h"

namespace nb = nanobind;
using namespace shoal;

namespace {

constexpr Names<Take, 3> take_names = {"take", 0, {"each", "round", "count"}};

struct Answered {
  SyncReply reply;
  double norm;
  double waited_s;
};

// Asks, waits for the answer, and carries the commits that came with it.
Answered ask(const PyClientPtr& self, SyncRequest request, double timeout_s) {
  StoreClient& client = self->use();
  const Deadline began = std::chrono::steady_clock::now();
  const Deadline deadline = deadline_in(timeout_s);
  const auto operation = take(without_gil([&] { return client.sync(std::move(request), deadline); }));
  Status status = wait_in_slices(client, operation, deadline);
  const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - began;
  if (status.code() == Code::timeout) status = without_gil([&] { return client.late_sync(*operation); });
  check(status);
  const SyncReply& reply = operation->reply;
  const double norm =
      reply.commits.empty() ? 0.0 : take(without_gil([&] { return client.carry(reply, deadline); }));
  return {reply, norm, waited.count()};
}

SyncRequest request_of(SyncVerb verb, uint32_t rank, uint64_t epoch = 0, uint64_t count = 0) {
  SyncRequest request;
  request.verb = verb;
  request.rank = rank;
  request.epoch = epoch;
  request.count = count;
  return request;
}

uint64_t growths_of(const SyncReply& reply) { return reply.numbers.empty() ? 0 : reply.numbers[0]; }

std::pair<uint64_t, uint64_t> sync_open(const PyClientPtr& self, uint32_t rank, uint32_t workers,
                                        const std::string& kind, double quorum, uint32_t count, int32_t slack,
                                        bool resize, bool back, double timeout_s) {
  SyncRequest request = request_of(resize ? SyncVerb::resize : SyncVerb::open, rank);
  if (back) request.step = kBack;
  request.config = {workers, take_names.parse(kind), quorum, count, slack};
  const SyncReply reply = ask(self, std::move(request), timeout_s).reply;
  return {reply.step, growths_of(reply)};
}

nb::dict advance(const PyClientPtr& self, uint32_t rank, uint64_t step, float weight, float lr, float clip,
                 const std::vector<std::pair<uint64_t, uint64_t>>& units, double timeout_s) {
  SyncRequest request = request_of(SyncVerb::advance, rank);
  request.step = step;
  request.weight = weight;
  request.lr = lr;
  request.clip = clip;
  for (const auto& [epoch, unit] : units) request.units.push_back({epoch, unit});
  const Answered answered = ask(self, std::move(request), timeout_s);
  nb::dict dict = counts({{"step", answered.reply.step},
                          {"commit", answered.reply.closed},
                          {"growths", growths_of(answered.reply)}});
  dict["dropped"] = answered.reply.dropped;
  dict["norm"] = answered.norm;
  dict["waited_s"] = answered.waited_s;
  return dict;
}

nb::dict sync_state(const PyClientPtr& self, double timeout_s) {
  const SyncReply reply = ask(self, request_of(SyncVerb::state, 0), timeout_s).reply;
  StoreClient& client = self->use();
  const StoreFigures figures =
      take(without_gil([&] { return client.store_figures(deadline_in(timeout_s)); }));
  nb::dict dict = counts({{"closed", reply.closed}, {"staged_bytes", figures.staged_bytes}});
  nb::list clocks;
  nb::list phases;
  nb::dict waiting;
  dict["dropped"] = reply.numbers.at(0);
  for (size_t i = 1; i + 2 < reply.numbers.size(); i += 3) {
    const auto phase = static_cast<SyncShard::Phase>(reply.numbers[i + 1]);
    clocks.append(reply.numbers[i]);
    phases.append(reply.numbers[i + 1]);
    if (phase == SyncShard::Phase::waiting || phase == SyncShard::Phase::at_end)
      waiting[nb::int_((i - 1) / 3)] = static_cast<double>(reply.numbers[i + 2]) / 1000.0;
  }
  dict["clocks"] = clocks;
  dict["phases"] = phases;
  dict["waiting"] = waiting;
  dict["staleness"] = counts(
      {{"count", figures.staleness.count}, {"sum", figures.staleness.sum}, {"max", figures.staleness.max}});
  return dict;
}

using Ranges = std::vector<std::pair<uint64_t, uint64_t>>;

Ranges ranges_of(const SyncReply& reply) {
  Ranges ranges;
  for (size_t i = 0; i + 1 < reply.numbers.size(); i += 2)
    ranges.emplace_back(reply.numbers[i], reply.numbers[i + 1]);
  return ranges;
}

Ranges lease(const PyClientPtr& self, uint32_t rank, uint64_t epoch, uint64_t want, bool overdue,
             double timeout_s) {
  SyncRequest request = request_of(SyncVerb::lease, rank, epoch, want);
  request.step = overdue ? kOverdue : 0;
  return ranges_of(ask(self, std::move(request), timeout_s).reply);
}

std::vector<uint64_t> keep_units(const PyClientPtr& self, uint32_t rank, uint64_t epoch,
                                 const std::vector<uint64_t>& units, double timeout_s) {
  SyncRequest request = request_of(SyncVerb::keep, rank, epoch);
  for (const uint64_t unit : units) request.units.push_back({epoch, unit});
  return ask(self, std::move(request), timeout_s).reply.numbers;
}

std::pair<uint64_t, std::vector<uint64_t>> resume(const PyClientPtr& self, uint32_t rank, uint64_t epoch,
                                                  double timeout_s) {
  const SyncReply reply = ask(self, request_of(SyncVerb::resume, rank, epoch), timeout_s).reply;
  return {reply.step, reply.numbers};
}

nb::dict ledger_report(const PyClientPtr& self, uint64_t epoch, double timeout_s) {
  const SyncReply reply = ask(self, request_of(SyncVerb::report, 0, epoch), timeout_s).reply;
  const std::vector<uint64_t>& numbers = reply.numbers;
  const size_t workers = reply.step;
  nb::dict dict = counts({{"units", numbers.at(0)}, {"done", numbers.at(1)}});
  nb::dict by_rank;
  nb::dict used;
  for (size_t i = 2; i < numbers.size(); ++i)
    if (i < 2 + workers)
      by_rank[nb::int_(i - 2)] = numbers[i];
    else if (numbers[i] > 0)
      used[nb::int_(i - 2 - workers)] = numbers[i];
  dict["by_rank"] = by_rank;
  dict["used"] = used;
  return dict;
}

}  // namespace

void bind_sync(nb::class_<PyClient>& c) {
  using namespace nb::literals;
  c.def("sync_open", &sync_open, nb::kw_only(), "rank"_a, "workers"_a, "take"_a, "quorum"_a = 1.0,
        "count"_a = 1, "slack"_a = -1, "resize"_a = false, "back"_a = false, "timeout_s"_a);
  c.def("advance", &advance, nb::kw_only(), "rank"_a, "step"_a, "weight"_a, "lr"_a = NAN, "clip"_a = 0.0f,
        "units"_a = std::vector<std::pair<uint64_t, uint64_t>>(), "timeout_s"_a);
  c.def("sync_state", &sync_state, "timeout_s"_a);
  c.def(
      "ledger_open",
      [](const PyClientPtr& self, uint64_t epoch, uint64_t units, bool split, bool fixed, bool several_steps,
         double timeout_s) {
        SyncRequest request = request_of(SyncVerb::ledger_open, 0, epoch, units);
        request.step = (split ? kSplit : 0) | (fixed ? kStatic : 0) | (several_steps ? kSeveralSteps : 0);
        return ranges_of(ask(self, std::move(request), timeout_s).reply);
      },
      nb::kw_only(), "epoch"_a, "units"_a, "split"_a = false, "fixed"_a = false, "several_steps"_a = false,
      "timeout_s"_a);
  c.def("lease", &lease, nb::kw_only(), "rank"_a, "epoch"_a, "want"_a, "overdue"_a = false, "timeout_s"_a);
  c.def("keep_units", &keep_units, nb::kw_only(), "rank"_a, "epoch"_a, "units"_a, "timeout_s"_a);
  c.def(
      "pass_end",
      [](const PyClientPtr& self, uint32_t rank, uint64_t epoch, uint64_t growths, double timeout_s) {
        SyncRequest request = request_of(SyncVerb::pass_end, rank, epoch);
        request.step = growths;
        const SyncReply reply = ask(self, std::move(request), timeout_s).reply;
        return std::tuple(reply.step, reply.again, growths_of(reply));
      },
      nb::kw_only(), "rank"_a, "epoch"_a, "growths"_a = 0, "timeout_s"_a);
  c.def(
      "leave",
      [](const PyClientPtr& self, uint32_t rank, bool away, double timeout_s) {
        SyncRequest request = request_of(SyncVerb::leave, rank);
        request.step = away ? kAway : 0;
        ask(self, std::move(request), timeout_s);
      },
      nb::kw_only(), "rank"_a, "away"_a = false, "timeout_s"_a = 10.0);
  c.def("resume", &resume, nb::kw_only(), "rank"_a, "epoch"_a, "timeout_s"_a);
  c.def("ledger_report", &ledger_report, nb::kw_only(), "epoch"_a, "timeout_s"_a);
}
