// What sessions do for chains: updates are sent on to the servers behind and answered when those have them,
// and the updates and images of a server before this one are taken.
#include <algorithm>
#include <bit>
#include <cstring>

#include "base/log.h"
#include "base/mutants.h"
#include "serve/session.h"

namespace shoal {
namespace {

constexpr size_t kHelpRows = 4096;  // below, a frame is applied before a helper is awake

// Copies an array to `at`, the next free place of a body, which it moves on; gives its place behind `begin`.
uint32_t put(std::span<std::byte> body, std::span<const std::byte> array, size_t begin, size_t& at) {
  const auto words = static_cast<uint32_t>((at - begin) / 4);
  if (!array.empty()) std::memcpy(body.data() + at, array.data(), array.size());
  at += (array.size() + 7) / 8 * 8;  // the next array may be one of keys
  return words;
}

}  // namespace

Result<Session::Groups> Session::groups_of(std::span<const Part> parts) const {
  Groups groups;
  std::vector<bool> seen(server_.store.shards());
  for (size_t i = 0; i < parts.size(); ++i) {
    const uint16_t shard = parts[i].shard;
    if (i > 0 && shard == parts[i - 1].shard) {
      groups.back().second = i + 1;
      continue;
    }
    if (shard != kSyncLog && (shard >= seen.size() || seen[shard]))
      return Status{Code::refused, "an update names shard " + std::to_string(shard) + " twice, or wrongly"};
    if (shard != kSyncLog) seen[shard] = true;
    groups.emplace_back(i, i + 1);
  }
  return groups;
}

void Session::answer_when_held(const Header& request, std::vector<Part> marks, std::vector<Part> parts,
                               const Status& status) {
  const auto text = std::as_bytes(std::span(status.message()));
  Mailbox::Mail mail{number_, reply_header(request, status), std::move(parts), {text.begin(), text.end()}};
  server_.chain.when_held(marks, [box = mail_, mail = std::move(mail)](const auto& lost) mutable {
    if (!lost.empty()) mail.header.code = static_cast<uint16_t>(Code::moved);
    std::erase_if(mail.parts, [&](const Part& part) {
      return std::find(lost.begin(), lost.end(), part.shard) != lost.end();
    });
    box->post(std::move(mail));
  });
}

// What it shows stays: an update that a server which takes the shard over may not have is asked for again.
Ack Session::pull_shown(uint16_t shard, const PullPart& request, const PullTarget& target) {
  Ack ack = server_.store.shard(shard).pull(request, target);
  if (ack.status.ok() && !request.any_copy && server_.chain.is_ahead(shard, ack.entry))
    ack.status = {Code::moved, "shard " + std::to_string(shard) + " is about to be taken over"};
  return ack;
}

// With all of its arrays in one body, whatever memory they lie in here.
void Session::send_on(const Header& header, std::span<const Part> parts, std::span<const PushPart> pushes,
                      const Groups& groups, std::span<const Ack> acks) {
  size_t bytes = 0;
  for (const PushPart& push : pushes)
    bytes += 8 * push.keys.size() + push.values.size() + push.pulled.size() + 16;
  std::vector<std::vector<std::byte>> changed(
      groups.size());  // settings, where this is the first push with them
  for (size_t g = 0; g < groups.size(); ++g) {
    if (!acks[g].settings.empty()) append_tables(acks[g].settings, changed[g]);
    bytes += changed[g].size() + 8;
  }
  const std::shared_ptr<Block> block = server_.chain.allocate(bytes);
  const std::span<std::byte> body = block->bytes();
  size_t at = 0;
  std::vector<Chain::Entry> entries;
  for (size_t g = 0; g < groups.size(); ++g) {
    if (!acks[g].status.ok() || acks[g].duplicate) continue;
    const size_t begin = at;
    std::vector<Part> mine;
    if (!changed[g].empty()) {
      Part& first = mine.emplace_back();
      first.shard = parts[groups[g].first].shard;
      first.term = acks[g].term;
      first.mode = static_cast<uint8_t>(PushMode::settings);
      first.values_at = put(body, changed[g], begin, at);
      first.values_words = static_cast<uint32_t>((changed[g].size() + 3) / 4);
    }
    for (size_t i = groups[g].first; i < groups[g].second; ++i) {
      const PushPart& push = pushes[i];
      if (push.mode == PushMode::settings) continue;  // as it came, and sent on above
      Part& part = mine.emplace_back(parts[i]);
      part.keys_segment = part.values_segment = 0;
      part.lr = push.lr;
      part.keys_at = put(body, std::as_bytes(push.keys), begin, at);
      part.values_at = put(body, push.values, begin, at);
      if (!push.pulled.empty()) part.pulled_at = put(body, push.pulled, begin, at);
    }
    for (Part& part : mine) set_log_entry(part, acks[g].entry);
    entries.push_back({std::move(mine), {block, begin, at - begin}});
  }
  if (!entries.empty()) server_.chain.send(header, std::move(entries));
}

Ack Session::replay(const FrameView& frame, std::span<const Part> parts, std::span<const PushPart> pushes) {
  const uint64_t entry = log_entry(parts[0]);
  const Header& header = frame.header;
  if (header.kind == static_cast<uint16_t>(Kind::image))
    return parts[0].shard == kSyncLog ? server_.sync.reached(entry)
                                      : server_.store.shard(parts[0].shard).reached(entry);
  if (parts[0].shard == kSyncLog) {
    std::optional<SyncRequest> request = decode_sync(frame.body);
    if (!request || header.kind != static_cast<uint16_t>(Kind::replicate_sync))
      return {.status = {Code::refused, "these bytes are no sync request"}};
    if (Status status = server_.store.shard(0).check_sender(parts[0].term); !status.ok())
      return {.status = std::move(status)};
    request->client = header.origin;
    request->incarnation = header.origin_incarnation;
    return server_.sync.replay(*request, std::bit_cast<double>(header.step), entry);
  }
  Shard& shard = server_.store.shard(parts[0].shard);
  if (header.kind == static_cast<uint16_t>(Kind::replicate_commit)) {
    Commit commit;
    std::span<const std::byte> body = frame.body;
    if (!decode_commit(body, commit)) return {.status = {Code::refused, "these bytes are no commit"}};
    Settings settings;
    if ((header.flags & kSettings) != 0) {
      Result<Settings> taken = take_tables(body);
      if (!taken.ok()) return {.status = taken.status()};
      settings = std::move(*taken);
    }
    return shard.commit(commit, parts[0].term, entry, settings);
  }
  if (pushes.empty()) return {.status = {Code::refused, "a server sends on an update without its rows"}};
  const PushIdentity identity{.client = header.origin,
                              .incarnation = header.origin_incarnation,
                              .seq = header.origin_seq,
                              .low = header.origin_low};
  if ((header.flags & kStage) != 0) return shard.stage(&identity, pushes, header.rank, header.step, entry);
  Settings settings;
  if (pushes[0].mode == PushMode::settings) {
    std::span<const std::byte> bytes = pushes[0].values;
    Result<Settings> taken = take_tables(bytes);
    if (!taken.ok()) return {.status = taken.status()};
    settings = std::move(*taken);
    pushes = pushes.subspan(1);
  }
  return shard.push(&identity, pushes, header.step, entry, false, settings);
}

// Applies what can be; gives the first error. Those whose turn has not come stay `unavailable`.
Status Session::try_entries(const FrameView& frame, const Groups& groups, std::vector<Ack>& acks) {
  std::vector<PushPart> pushes;
  std::vector<std::vector<int64_t>> copies;
  if (frame.header.kind == static_cast<uint16_t>(Kind::replicate_push))
    if (Status status = check_push(frame, pushes, copies); !status.ok()) {
      // A table that is not declared here yet will be: its turn comes then.
      for (Ack& ack : acks)
        if (status.code() != Code::unknown_table) ack.status = status;
      return status;
    }
  size_t rows = 0;
  for (const PushPart& push : pushes) rows += push.keys.size();
  const auto apply = [&](size_t g) {
    if (acks[g].status.code() != Code::unavailable) return;
    const auto [first, last] = groups[g];
    const size_t count = pushes.empty() ? 0 : last - first;
    acks[g] = replay(frame, frame.parts.subspan(first, last - first),
                     std::span<const PushPart>(pushes).subspan(count == 0 ? 0 : first, count));
  };
  server_.crew.run(groups.size(), apply, rows < kHelpRows);
  for (const Ack& ack : acks)
    if (!ack.status.ok() && ack.status.code() != Code::unavailable) return ack.status;
  return {};
}

void Session::finish_entries(const FrameView& frame, const Groups& groups, std::span<const Ack> acks,
                             const Status& status) {
  if (!status.ok() && status.code() != Code::moved &&
      frame.header.kind != static_cast<uint16_t>(Kind::image)) {
    log_line("server", "this copy cannot follow: " + status.message());
    server_.diverged = true;
  }
  std::vector<Part> had;  // what is here, whatever was refused of the rest
  std::vector<Chain::Entry> fresh;
  const bool goes_on = server_.chain.goes_on(frame.parts);
  const bool is_push = frame.header.kind == static_cast<uint16_t>(Kind::replicate_push);
  const auto body = std::make_shared<std::vector<std::byte>>();
  if (goes_on && !is_push) body->assign(frame.body.begin(), frame.body.end());
  for (size_t g = 0; g < groups.size(); ++g) {
    if (!acks[g].status.ok()) continue;
    had.push_back(frame.parts[groups[g].first]);
    if (!acks[g].duplicate) fresh.push_back({{had.back()}, Chain::Bytes(body)});
  }
  if (goes_on && is_push) {
    std::vector<PushPart> pushes;
    std::vector<std::vector<int64_t>> copies;
    if (check_push(frame, pushes, copies).ok())  // as it was when it was applied
      send_on(frame.header, frame.parts, pushes, groups, acks);
  } else if (goes_on) {
    server_.chain.send(frame.header, std::move(fresh));
  }
  answer_when_held(frame.header, had, had, status);
}

// How many have not had their turn.
ptrdiff_t Session::waiting(const std::vector<Ack>& acks) {
  return std::count_if(acks.begin(), acks.end(),
                       [](const Ack& ack) { return ack.status.code() == Code::unavailable; });
}

Session::Outcome Session::replicate(const FrameView& frame, ReplySink& sink) {
  const Result<Groups> groups = groups_of(frame.parts);
  if (!groups.ok()) return answer(frame, groups.status(), sink);
  std::vector<Ack> acks(groups->size(), Ack{.status = {Code::unavailable, ""}});
  const Status status = try_entries(frame, *groups, acks);
  if (waiting(acks) == 0) {
    finish_entries(frame, *groups, acks, status);
  } else {  // also where a part was refused: the others still have their turn
    early_.push_back({frame.header,
                      {frame.parts.begin(), frame.parts.end()},
                      {frame.body.begin(), frame.body.end()},
                      *groups,
                      std::move(acks)});
  }
  try_early();
  return Outcome::done;
}

// A part of a frame may have been what others wait for, and these what still others do.
void Session::try_early() {
  for (bool moved = !SHOAL_MUTANT(early_forgotten); moved;) {
    moved = false;
    for (auto it = early_.begin(); it != early_.end();) {
      const FrameView early{it->header, it->parts, it->body};
      const ptrdiff_t before = waiting(it->acks);
      const Status status = try_entries(early, it->groups, it->acks);
      moved = moved || waiting(it->acks) < before;
      if (waiting(it->acks) > 0) {
        ++it;
        continue;
      }
      finish_entries(early, it->groups, it->acks, status);
      it = early_.erase(it);
    }
  }
}

Session::Outcome Session::image(const FrameView& frame, ReplySink& sink) {
  const bool sync = frame.parts.size() == 1 && frame.parts[0].shard == kSyncLog;
  if (!sync && (frame.parts.size() != 1 || frame.parts[0].shard >= server_.store.shards()))
    return answer(frame, {Code::refused, "an image names one shard"}, sink);
  const Part& part = frame.parts[0];
  Shard& shard = server_.store.shard(sync ? 0 : part.shard);
  if (Status status = shard.check_sender(part.term); !status.ok()) return answer(frame, status, sink);
  if (part.mode == 1) return replicate(frame, sink);  // answered when the log is there up to its entry
  if (sync) {
    const bool taken = server_.sync.decode(frame.body, log_entry(part));
    return answer(frame, taken ? Status{} : Status{Code::refused, "this is no image of the sync shard"},
                  sink);
  }
  if (part.table == 0) {
    std::span<const std::byte> head = frame.body;
    const Result<Settings> settings = take_tables(head);
    if (!settings.ok()) return answer(frame, settings.status(), sink);
    shard.clear();
    if (Status status = shard.restore(*settings); !status.ok()) return answer(frame, status, sink);
    return answer(frame, shard.restore(head), sink);
  }
  const size_t count = part.count;
  const size_t heads = count * (sizeof(int64_t) + sizeof(RowMeta));
  const size_t floats = part.values_words;
  if (frame.body.size() < heads + 4 * floats)
    return answer(frame, {Code::refused, "a page of an image is cut short"}, sink);
  ImagePage page{.table = part.table};
  page.keys.resize(count);
  page.metas.resize(count);
  page.rows.resize(floats);
  const std::byte* at = frame.body.data();
  if (count > 0) {
    std::memcpy(page.keys.data(), at, count * sizeof(int64_t));
    std::memcpy(page.metas.data(), at + count * sizeof(int64_t), count * sizeof(RowMeta));
  }
  if (floats > 0) std::memcpy(page.rows.data(), at + heads, 4 * floats);
  return answer(frame, shard.restore(page), sink);
}

}  // namespace shoal
