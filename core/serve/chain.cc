#include "serve/chain.h"

#include <algorithm>
#include <set>

#include "base/log.h"
#include "base/mutants.h"

namespace shoal {
namespace {

// What a shard keeps for servers behind before replies wait for those, under whatever mode.
constexpr size_t kUnheldBytes = size_t{256} << 20;

// Calls `f` for every run of parts that are one entry of one shard.
template <typename F>
void each_entry(std::span<const Part> parts, F f) {
  for (size_t first = 0; first < parts.size();) {
    size_t last = first + 1;
    while (last < parts.size() && parts[last].shard == parts[first].shard) ++last;
    f(parts.subspan(first, last - first));
    first = last;
  }
}

}  // namespace

void Chain::introduce(uint32_t server, uint32_t incarnation, size_t servers) {
  const std::lock_guard lock(mutex_);
  if (machine_ == nullptr)
    machine_ = std::make_unique<ClientMachine>(kServerClients + server, incarnation, 0);
  servers_ = std::max(servers_, servers);
  machine_->grow(servers_);
}

// Under mutex_.
std::shared_ptr<Chain::Sent> Chain::post(uint32_t target, const Header& header, std::vector<Part> parts,
                                         const Bytes& body, const FillPtr& fill) {
  auto sent = std::make_shared<Sent>();
  sent->bytes = body;
  sent->fill = fill;
  if (fill != nullptr) {
    ++fill->open;
    fill->bytes += body->size();
  }
  for (const Part& part : parts)
    if (sent->marks.empty() || sent->marks.back().first != part.shard)
      sent->marks.emplace_back(part.shard, log_entry(part));
  auto request = std::make_shared<Request>();
  request->operation = sent;
  request->server = target;
  request->header = header;
  request->parts = std::move(parts);
  request->body.emplace_back(*sent->bytes);
  request->body_bytes = sent->bytes->size();
  machine_->begin(*sent, false);
  machine_->add(std::move(request));
  machine_->seal(*sent);
  return sent;
}

// Under mutex_.
void Chain::send_unheld(uint16_t shard) {
  PerShard& here = shards_[shard];
  if (here.place.next == kNobody || here.paused) return;
  for (auto& [entry, kept] : here.unheld) {
    for (Part& part : kept.parts) part.term = here.place.term;
    post(here.place.next, kept.header, kept.parts, kept.body);
  }
}

// Under mutex_, these three.
void Chain::forget(PerShard& here, uint64_t up_to) {
  const auto end = here.unheld.upper_bound(up_to);
  for (auto it = here.unheld.begin(); it != end; it = here.unheld.erase(it))
    here.unheld_bytes -= it->second.bytes;
}

void Chain::release_all(PerShard& here, std::vector<std::shared_ptr<Waiter>>& ready) {
  for (auto& [entry, waiter] : here.waiting)
    if (--waiter->marks == 0) ready.push_back(std::move(waiter));
  here.waiting.clear();
}

// Where copies may come later only the head answers early: to the server before it a member must not, for
// that one would forget an entry which then goes with this one.
bool Chain::awaits(const ChainPlace& place) const {
  return !weak_ || (!place.head && !SHOAL_MUTANT(weak_to_servers));
}

// A server behind that is far behind slows everybody down rather than fill this one's memory.
bool Chain::waits(const PerShard& here) {
  return here.awaited || (here.place.next != kNobody && here.unheld_bytes > kUnheldBytes);
}

void Chain::place(uint16_t shard, const ChainPlace& place) {
  std::vector<std::shared_ptr<Waiter>> ready;
  {
    const std::lock_guard lock(mutex_);
    PerShard& here = shards_[shard];
    if (place.term < here.place.term) return;
    const bool same = here.place.next == place.next && here.place.term == place.term;
    here.paused = false;
    here.fill = nullptr;
    here.place = place;
    here.awaited = place.next != kNobody && awaits(place);
    if (place.next == kNobody) forget(here, UINT64_MAX);
    for (auto& [entry, waiter] : here.waiting)
      if (!place.member) waiter->lost.push_back(shard);
    if (!waits(here)) release_all(here, ready);
    if (!same && !SHOAL_MUTANT(log_not_sent_again)) send_unheld(shard);
    if (place.next != kNobody) in_use_ = true;
    ++answers_;
    answered_.notify_all();  // whoever fills was waiting for nothing
  }
  for (const auto& waiter : ready) waiter->done(waiter->lost);
  wake_();
}

uint32_t Chain::unheld(uint16_t shard) {
  if (!weak_) return 0;
  const std::lock_guard lock(mutex_);
  const PerShard& here = shards_[shard];
  return here.place.next == kNobody ? 0 : static_cast<uint32_t>(1 + here.unheld.size());
}

void Chain::send(const Header& header, std::span<const Part> parts, Bytes body) {
  {
    const std::lock_guard lock(mutex_);
    std::map<uint32_t, std::vector<Part>> together;
    const size_t part_bytes = sizeof(Part) + body->size() / std::max<size_t>(1, parts.size());
    each_entry(parts, [&](std::span<const Part> entry) {
      PerShard& here = shards_[entry[0].shard];
      if (here.place.next == kNobody) return;
      Kept kept{header, {entry.begin(), entry.end()}, body, entry.size() * part_bytes};
      for (Part& part : kept.parts) part.term = here.place.term;
      if (!here.paused) {
        std::vector<Part>& more = together[here.place.next];
        more.insert(more.end(), kept.parts.begin(), kept.parts.end());
      }
      here.unheld_bytes += kept.bytes;
      here.unheld.emplace(log_entry(entry[0]), std::move(kept));
    });
    for (auto& [target, mine] : together) post(target, header, std::move(mine), body);
  }
  wake_();
}

void Chain::declare(std::span<const std::byte> table) {
  {
    const std::lock_guard lock(mutex_);
    std::set<uint32_t> targets;
    for (const auto& [shard, here] : shards_)
      if (here.place.next != kNobody) targets.insert(here.place.next);
    Header header;
    header.kind = static_cast<uint16_t>(Kind::declare);
    const auto body = std::make_shared<const std::vector<std::byte>>(table.begin(), table.end());
    for (const uint32_t target : targets) post(target, header, {}, body);
  }
  wake_();
}

void Chain::when_held(std::span<const Part> parts, Done done) {
  auto waiter = std::make_shared<Waiter>(Waiter{.marks = 0, .lost = {}, .done = std::move(done)});
  {
    const std::lock_guard lock(mutex_);
    each_entry(parts, [&](std::span<const Part> entry) {
      PerShard& here = shards_[entry[0].shard];
      const uint64_t number = log_entry(entry[0]);
      // Applied as a member, which this server is no more. (One that is being filled is not one yet.)
      const bool left = !here.place.member && entry[0].term < here.place.term;
      if (here.held < number && left) waiter->lost.push_back(entry[0].shard);
      if (here.held >= number || !waits(here) || SHOAL_MUTANT(ack_unheld)) return;
      here.waiting.emplace(number, waiter);
      ++waiter->marks;
    });
    if (waiter->marks > 0) return;
  }
  waiter->done(waiter->lost);
}

// Under mutex_.
void Chain::hold(uint16_t shard, uint64_t entry, std::vector<std::shared_ptr<Waiter>>& ready) {
  PerShard& here = shards_[shard];
  if (entry <= here.held) return;
  here.held = entry;
  forget(here, entry);
  const auto end = here.waiting.upper_bound(entry);
  for (auto it = here.waiting.begin(); it != end; it = here.waiting.erase(it))
    if (--it->second->marks == 0) ready.push_back(std::move(it->second));
}

Chain::FillPtr Chain::begin_fill(uint16_t shard, uint32_t target, uint32_t term) {
  const std::lock_guard lock(mutex_);
  PerShard& here = shards_[shard];
  const bool behind = here.place.next != kNobody && here.fill == nullptr;
  const bool current = (here.place.member && here.place.term == term) || SHOAL_MUTANT(fill_any_term);
  if (!current || behind || target >= servers_) return nullptr;
  here.place.next = target;
  here.awaited = false;
  here.paused = true;
  here.held = 0;
  forget(here, UINT64_MAX);
  in_use_ = true;
  auto fill = std::make_shared<Fill>();
  fill->shard = shard;
  fill->target = target;
  fill->term = term;
  return here.fill = fill;
}

void Chain::give_up(const FillPtr& fill) {
  std::vector<std::shared_ptr<Waiter>> ready;
  {
    const std::lock_guard lock(mutex_);
    PerShard& here = shards_[fill->shard];
    if (!is_current(*fill)) return;
    here.fill = nullptr;
    here.place.next = kNobody;
    here.awaited = here.paused = false;
    forget(here, UINT64_MAX);
    release_all(here, ready);
  }
  for (const auto& waiter : ready) waiter->done(waiter->lost);
}

// Under mutex_. Another fill, or a new placement, may have come between.
bool Chain::is_current(const Fill& fill) { return shards_[fill.shard].fill.get() == &fill; }

void Chain::send_image(const FillPtr& fill, const Header& header, std::vector<Part> parts, Bytes body) {
  {
    const std::lock_guard lock(mutex_);
    post(fill->target, header, std::move(parts), body, fill);
  }
  wake_();
}

void Chain::image_sent(const FillPtr& fill, uint64_t entry) {
  {
    const std::lock_guard lock(mutex_);
    PerShard& here = shards_[fill->shard];
    if (!is_current(*fill)) return;
    here.paused = false;
    here.awaited = awaits(here.place);
    // What the image holds need not be sent; `held` grows by answers alone.
    forget(here, SHOAL_MUTANT(fill_without_log) ? UINT64_MAX : entry);
    send_unheld(fill->shard);
    Part end;
    end.shard = fill->shard;
    end.term = here.place.term;
    end.mode = 1;
    // It is answered when the log is there up to the last entry that was acknowledged without it.
    set_log_entry(end, here.unheld.empty() ? entry : here.unheld.rbegin()->first);
    Header header;
    header.kind = static_cast<uint16_t>(Kind::image);
    post(fill->target, header, {end}, std::make_shared<const std::vector<std::byte>>(), fill)->ends_fill =
        true;
  }
  wake_();
}

Chain::FillState Chain::state(const FillPtr& fill) {
  const std::lock_guard lock(mutex_);
  if (fill->failed.ok() && !is_current(*fill)) fill->failed = {Code::moved, "the shard was placed anew"};
  return {fill->open, fill->bytes, fill->done, fill->failed};
}

uint64_t Chain::answers() {
  const std::lock_guard lock(mutex_);
  return answers_;
}

bool Chain::wait_for_answer(uint64_t answers, std::chrono::steady_clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  return answered_.wait_until(lock, deadline, [&] { return answers_ > answers; });
}

void Chain::restored(uint16_t shard) {
  const std::lock_guard lock(mutex_);
  shards_[shard].held = 0;
  forget(shards_[shard], UINT64_MAX);
}

size_t Chain::servers() {
  const std::lock_guard lock(mutex_);
  return servers_;
}

std::shared_ptr<Request> Chain::next_to_send(uint32_t server) {
  const std::lock_guard lock(mutex_);
  return machine_->next_to_send(server);
}

bool Chain::has_open(uint32_t server) {
  const std::lock_guard lock(mutex_);
  return machine_ != nullptr && machine_->has_open(server);
}

void Chain::lost(uint32_t server) {
  const std::lock_guard lock(mutex_);
  machine_->lost(server);
}

void Chain::gone(uint32_t server) {
  const std::lock_guard lock(mutex_);
  if (!machine_->has_open(server)) return;
  machine_->fail(server, {Code::moved, "gone"});
  ++answers_;
  answered_.notify_all();
}

void Chain::on_reply(uint32_t server, const FrameView& frame) {
  std::vector<std::shared_ptr<Waiter>> ready;
  {
    const std::lock_guard lock(mutex_);
    const std::shared_ptr<Request> request = machine_->find(server, frame.header.request);
    if (request == nullptr) return;
    // Where it refuses a shard, this server has not learnt the newest placement: what is kept is sent again
    // with that one.
    auto& sent = static_cast<Sent&>(*request->operation);
    const auto code = static_cast<Code>(frame.header.code);
    const auto has = [&](uint16_t shard, uint64_t entry) {
      if (shards_[shard].place.next == server) hold(shard, entry, ready);  // not one that was there before
    };
    if (code == Code::ok)
      for (const auto& [shard, entry] : sent.marks) has(shard, entry);
    for (const Part& part : frame.parts) has(part.shard, log_entry(part));
    if (code != Code::ok && code != Code::moved) {
      const std::string text(reinterpret_cast<const char*>(frame.body.data()), frame.body.size());
      log_line("server", "server " + std::to_string(server) + " refuses a frame of kind " +
                             std::to_string(request->header.kind) + ": " + text.substr(0, text.find('\0')));
    }
    if (Fill* fill = sent.fill.get(); fill != nullptr) {
      --fill->open;
      fill->bytes -= sent.bytes->size();
      if (code != Code::ok && fill->failed.ok())
        fill->failed = {code, "the server that is filled refuses it"};
      fill->done = fill->done || (sent.ends_fill && code == Code::ok);
    }
    machine_->answered(server, frame.header.request, {});
    ++answers_;
    answered_.notify_all();
  }
  for (const auto& waiter : ready) waiter->done(waiter->lost);
}

}  // namespace shoal
