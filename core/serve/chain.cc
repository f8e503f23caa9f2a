#include "serve/chain.h"

#include <algorithm>
#include <new>
#include <set>

#include "base/log.h"
#include "base/mutants.h"

namespace shoal {
namespace {

// What a shard keeps for servers behind before replies wait for those, under whatever mode.
constexpr size_t kUnheldBytes = size_t{256} << 20;
// What is on its way usually; beyond it bodies are copied through the socket.
constexpr size_t kSharedBytesMax = size_t{512} << 20;
constexpr size_t kSegmentBytesMin = size_t{16} << 20;
constexpr size_t kWarmBytes = size_t{64} << 20;

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

Chain::Chain(std::function<void()> wake, bool weak)
    : wake_(std::move(wake)),
      weak_(weak),
      shared_arena_(make_shared_arena(kSegmentBytesMin, kSharedBytesMax)),
      heap_arena_(make_heap_arena(kWarmBytes)) {}

std::shared_ptr<Block> Chain::allocate(size_t bytes) {
  std::shared_ptr<Block> block = shares_memory_ ? shared_arena_->allocate(bytes) : nullptr;
  if (block == nullptr) block = heap_arena_->allocate(bytes);
  if (block == nullptr) throw std::bad_alloc();
  return block;
}

void Chain::introduce(uint32_t server, uint32_t incarnation, size_t servers) {
  const std::lock_guard lock(mutex_);
  if (machine_ == nullptr)
    machine_ = std::make_unique<ClientMachine>(kServerClients + server, incarnation, 0);
  servers_ = std::max(servers_, servers);
  machine_->grow(servers_);
}

size_t Chain::bytes_of(const Entry& entry) { return entry.parts.size() * sizeof(Part) + entry.body.size; }

// Under mutex_.
std::shared_ptr<Chain::Sent> Chain::post(uint32_t target, const Header& header,
                                         std::span<const Entry> entries, const FillPtr& fill) {
  auto sent = std::make_shared<Sent>();
  auto request = std::make_shared<Request>();
  for (const auto& [parts, body] : entries) {
    sent->bodies.emplace_back(parts.size(), body);
    request->parts.insert(request->parts.end(), parts.begin(), parts.end());
    if (body.block != nullptr) request->blocks.push_back(body.block);
    if (!parts.empty()) sent->marks.emplace_back(parts[0].shard, log_entry(parts[0]));
    if (fill != nullptr) fill->bytes += body.size;
  }
  sent->fill = fill;
  if (fill != nullptr) ++fill->open;
  request->operation = sent;
  request->server = target;
  request->header = header;
  machine_->begin(*sent, false);
  machine_->add(std::move(request));
  machine_->seal(*sent);
  return sent;
}

// Under mutex_.
void Chain::send_unheld(uint16_t shard) {
  PerShard& here = shards_[shard];
  if (here.place.next == kNobody || here.paused) return;
  for (auto& [number, kept] : here.unheld) {
    for (Part& part : kept.entry.parts) part.term = here.place.term;
    post(here.place.next, kept.header, {&kept.entry, 1});
  }
}

// Under mutex_, these three.
void Chain::forget(PerShard& here, uint64_t up_to) {
  const auto end = here.unheld.upper_bound(up_to);
  for (auto it = here.unheld.begin(); it != end; it = here.unheld.erase(it))
    here.unheld_bytes -= bytes_of(it->second.entry);
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
  return here.awaited || !(here.placed || SHOAL_MUTANT(unplaced_is_last)) ||
         (here.place.next != kNobody && here.unheld_bytes > kUnheldBytes);
}

bool Chain::goes_on(const PerShard& here) {
  return here.place.next != kNobody || !(here.placed || SHOAL_MUTANT(unplaced_is_last));
}

void Chain::place(uint16_t shard, const ChainPlace& place) {
  std::vector<std::shared_ptr<Waiter>> ready;
  {
    const std::lock_guard lock(mutex_);
    PerShard& here = shards_[shard];
    if (place.term < here.place.term) return;
    const bool same = here.place.next == place.next && here.place.term == place.term;
    here.paused = false;
    fills_.erase(shard);
    note_fills();
    here.place = place;
    here.placed = true;
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

bool Chain::goes_on(std::span<const Part> parts) {
  const std::lock_guard lock(mutex_);
  return std::any_of(parts.begin(), parts.end(),
                     [&](const Part& part) { return goes_on(shards_[part.shard]); });
}

void Chain::send(const Header& header, std::vector<Entry> entries) {
  {
    const std::lock_guard lock(mutex_);
    std::map<uint32_t, std::vector<Entry>> together;
    for (Entry& entry : entries) {
      PerShard& here = shards_[entry.parts[0].shard];
      if (!goes_on(here)) continue;
      for (Part& part : entry.parts) part.term = here.place.term;
      if (!here.paused && here.place.next != kNobody) together[here.place.next].push_back(entry);
      here.unheld_bytes += bytes_of(entry);
      const uint64_t number = log_entry(entry.parts[0]);
      here.unheld.emplace(number, Kept{header, std::move(entry)});
    }
    for (const auto& [target, mine] : together) post(target, header, mine);
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
    const Entry entry{{}, body};
    for (const uint32_t target : targets) post(target, header, {&entry, 1});
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
  const bool behind = here.place.next != kNobody && !fills_.contains(shard);
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
  return fills_[shard] = fill;
}

// Under mutex_.
void Chain::end_fill(uint16_t shard, std::vector<std::shared_ptr<Waiter>>& ready) {
  PerShard& here = shards_[shard];
  fills_.erase(shard);
  note_fills();
  here.place.next = kNobody;
  here.awaited = here.paused = false;
  forget(here, UINT64_MAX);
  release_all(here, ready);
}

void Chain::give_up(const FillPtr& fill) {
  std::vector<std::shared_ptr<Waiter>> ready;
  {
    const std::lock_guard lock(mutex_);
    if (!is_current(*fill)) return;
    end_fill(fill->shard, ready);
  }
  for (const auto& waiter : ready) waiter->done(waiter->lost);
}

// Under mutex_.
void Chain::note_fills() {
  images_sent_ = std::any_of(fills_.begin(), fills_.end(),
                             [this](const auto& one) { return shards_[one.first].awaited; });
}

bool Chain::is_ahead(uint16_t shard, uint64_t entry) {
  if (!images_sent_ || SHOAL_MUTANT(shows_unheld)) return false;
  const std::lock_guard lock(mutex_);
  const PerShard& here = shards_[shard];
  return fills_.contains(shard) && here.awaited && entry > std::max(here.held, here.alone);
}

// Under mutex_. Another fill, or a new placement, may have come between.
bool Chain::is_current(const Fill& fill) {
  const auto it = fills_.find(fill.shard);
  return it != fills_.end() && it->second.get() == &fill;
}

void Chain::send_image(const FillPtr& fill, const Header& header, std::vector<Part> parts, Bytes body) {
  {
    const Entry entry{std::move(parts), std::move(body)};
    const std::lock_guard lock(mutex_);
    post(fill->target, header, {&entry, 1}, fill);
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
    here.alone = here.unheld.empty() ? entry : here.unheld.rbegin()->first;
    note_fills();
    set_log_entry(end, here.alone);
    Header header;
    header.kind = static_cast<uint16_t>(Kind::image);
    const Entry last{{end}, std::make_shared<const std::vector<std::byte>>()};
    post(fill->target, header, {&last, 1}, fill)->ends_fill = true;
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

// The arrays of a push lie in memory that both servers have, or one behind the other in the frame's body.
std::shared_ptr<Request> Chain::next_to_send(uint32_t server, bool near) {
  const std::lock_guard lock(mutex_);
  const std::shared_ptr<Request> open = machine_->next_to_send(server);
  if (open == nullptr) return nullptr;
  auto frame = std::make_shared<Request>(*open);
  auto part = frame->parts.begin();
  for (const auto& [parts, body] : static_cast<const Sent&>(*open->operation).bodies) {
    const Segment* segment = near && body.block != nullptr ? body.block->segment().get() : nullptr;
    const std::span<const std::byte> bytes = body.span();
    size_t at = frame->body_bytes;
    if (segment != nullptr) {
      at = body.block->offset() + body.begin;
    } else if (!frame->body.empty() && frame->body.back().data() == bytes.data()) {
      at -= bytes.size();  // shards that take the same commit
    } else {
      frame->body.push_back(bytes);
      frame->body_bytes += bytes.size();
    }
    for (const auto end = part + static_cast<ptrdiff_t>(parts); part != end; ++part) {
      if (segment != nullptr)
        part->keys_segment = part->values_segment = static_cast<uint16_t>(segment->id());
      part->keys_at += static_cast<uint32_t>(at / 4);
      part->values_at += static_cast<uint32_t>(at / 4);
      part->pulled_at += static_cast<uint32_t>(at / 4);
    }
  }
  return frame;
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
  std::vector<std::shared_ptr<Waiter>> ready;
  {
    const std::lock_guard lock(mutex_);
    bool changed = machine_->has_open(server);
    // The coordinator may not know of its fill (another began it) and have left the shard's place as it is.
    for (auto next = fills_.begin(); next != fills_.end();) {
      const FillPtr fill = (next++)->second;
      if (fill->target != server || SHOAL_MUTANT(gone_is_awaited)) continue;
      end_fill(fill->shard, ready);
      changed = true;
    }
    if (!changed) return;
    for (const auto& request : machine_->open_requests(server))
      for (const auto& block : request->blocks)
        if (block->segment() != nullptr) strays_.push_back(block);
    machine_->fail(server, {Code::moved, "gone"});
    ++answers_;
    answered_.notify_all();
  }
  for (const auto& waiter : ready) waiter->done(waiter->lost);
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
      for (const auto& [parts, body] : sent.bodies) fill->bytes -= body.size;
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
