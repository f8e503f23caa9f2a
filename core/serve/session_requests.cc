// The requests of an open session: push, pull, scan, figures. Every array that a frame names is checked
// against the memory it claims to lie in before anything is done.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/copy.h"
#include "base/mutants.h"
#include "serve/session.h"

namespace shoal {
namespace {

// Replies to pulls are cut into frames of about this size, large enough that waking helpers for the gather
// pays and small enough that the last cache level holds one while it is sent.
constexpr size_t kReplyBytes = 4 * 1024 * 1024;
constexpr size_t kPieceBytes = 64 * 1024;  // of it, gathered by one thread at a time
constexpr size_t kHelpBytes = 512 * 1024;  // below, a frame is gathered alone
constexpr size_t kHelpRows = 4096;  // below, a request is done at once; above, helpers are worth waking
constexpr size_t kScanBytes = 4 * 1024 * 1024;  // copied under the shard's mutex

// Looks a table up once for a run of parts that name it.
class TableFinder {
 public:
  explicit TableFinder(const Store& store) : store_(store) {}
  const TableSpec* find(uint32_t id) {
    if (spec_ == nullptr || spec_->id != id) spec_ = store_.table(id);
    return spec_.get();
  }

 private:
  const Store& store_;
  std::shared_ptr<const TableSpec> spec_;
};

Status not_declared(uint32_t table) {
  return {Code::unknown_table, "no table with id " + std::to_string(table) + " was declared"};
}

Part reply_part(const Part& request, const Ack& ack) {
  Part part;
  part.shard = request.shard;
  part.table = request.table;
  part.codec = request.codec;
  part.mode = ack.duplicate ? 1 : 0;
  part.term = ack.term;
  part.version = ack.version;
  return part;
}

Status other_placement(const FrameView& frame) {
  const uint32_t asked = frame.header.member_term;
  return {Code::moved, "another placement is known here than " + std::to_string(asked)};
}

}  // namespace

Header Session::reply_header(const Header& request, const Status& status) {
  Header reply;
  reply.kind = static_cast<uint16_t>(Kind::reply);
  reply.request = request.request;
  reply.seq = request.seq;
  reply.code = static_cast<uint16_t>(status.code());
  reply.last = 1;
  return reply;
}

bool Session::knows_placement(const FrameView& frame) const {
  return frame.header.member_term == server_.placement.load();
}

Session::Outcome Session::answer(const FrameView& frame, const Status& status, ReplySink& sink) {
  sink.send(reply_header(frame.header, status), std::as_bytes(std::span(status.message())));
  return Outcome::done;
}

// A part per acknowledgement, and the first error among them.
Session::Outcome Session::answer_parts(const FrameView& frame, std::span<const Ack> acks,
                                       const std::function<const Part&(size_t)>& request, ReplySink& sink) {
  Status failed;
  for (const Ack& ack : acks)
    if (failed.ok()) failed = ack.status;
  const ReplySink::Draft draft = sink.begin(acks.size(), failed.message().size());
  for (size_t i = 0; i < acks.size(); ++i) draft.parts[i] = reply_part(request(i), acks[i]);
  if (!failed.ok()) std::memcpy(draft.body, failed.message().data(), failed.message().size());
  sink.finish(reply_header(frame.header, failed));
  return Outcome::done;
}

Result<std::span<const std::byte>> Session::array(const FrameView& frame, uint16_t segment, uint32_t at,
                                                  size_t bytes) const {
  std::span<const std::byte> memory = frame.body;
  if (segment != 0) {
    const auto it = segments_.find(segment);
    if (it == segments_.end())
      return Status{Code::refused, "segment " + std::to_string(segment) + " was never announced"};
    memory = it->second->bytes();
  }
  const auto found = array_in(memory, at, bytes);
  if (!found) {
    return Status{Code::refused, "an array of " + std::to_string(bytes) + " bytes at " +
                                     std::to_string(uint64_t{at} * 4) + " does not lie in its memory of " +
                                     std::to_string(memory.size()) + " bytes"};
  }
  return *found;
}

// All that a shard could object to in the frame itself, so that a refusal is of the whole frame.
Status Session::check_push(const FrameView& frame, std::vector<PushPart>& parts,
                           std::vector<std::vector<int64_t>>& copies) const {
  const bool staged = (frame.header.flags & kStage) != 0;
  const bool by_client = frame.header.kind == static_cast<uint16_t>(Kind::push);
  if (by_client && (frame.parts.size() > kPushPartsMax || frame.body.size() > kPushBodyBytesMax))
    return {Code::refused, "a push has no room for what its head sends along"};
  TableFinder tables(server_.store);
  for (const Part& part : frame.parts) {
    if (part.shard >= server_.store.shards() || !is_codec(part.codec) || part.mode > (by_client ? 2 : 3) ||
        part.keys_at % 2 != 0) {
      return {Code::refused, "a push names shard " + std::to_string(part.shard) + ", codec " +
                                 std::to_string(part.codec) + ", mode " + std::to_string(part.mode)};
    }
    if (part.mode == static_cast<uint8_t>(PushMode::settings)) {
      const auto settings = array(frame, part.values_segment, part.values_at, size_t{4} * part.values_words);
      if (!settings.ok()) return settings.status();
      parts.push_back({.term = part.term, .mode = PushMode::settings, .values = *settings});
      continue;
    }
    const TableSpec* spec = tables.find(part.table);
    if (spec == nullptr) return not_declared(part.table);
    const auto keys = array(frame, part.keys_segment, part.keys_at, size_t{8} * part.count);
    if (!keys.ok() || (spec->dense && part.count > spec->pieces()))
      return keys.ok() ? Status{Code::refused, "more pieces than the tensor has"} : keys.status();
    const size_t bytes = spec->dense ? size_t{4} * part.values_words
                                     : size_t{part.count} * encoded_bytes(static_cast<Codec>(part.codec),
                                                                          static_cast<uint32_t>(spec->dim));
    const auto values = array(frame, part.values_segment, part.values_at, bytes);
    if (!values.ok()) return values.status();
    std::span<const int64_t> numbers(reinterpret_cast<const int64_t*>(keys->data()), part.count);
    if (spec->dense) {
      // Piece numbers are checked and then relied on, and a peer can still write to its segment: copied.
      numbers = copies.emplace_back(numbers.begin(), numbers.end());
    }
    std::span<const std::byte> pulled;
    if (part.dc_lambda != 0.0f) {
      const size_t pulled_bytes = spec->rows_bytes(numbers, Codec::fp32).value_or(0);
      const auto found = array(frame, part.values_segment, part.pulled_at, pulled_bytes);
      if (!found.ok()) return found.status();
      pulled = *found;
    }
    parts.push_back({.table = part.table,
                     .term = part.term,
                     .mode = static_cast<PushMode>(part.mode),
                     .codec = static_cast<Codec>(part.codec),
                     // Settled here: a copy of the shard may learn of another rate at another time.
                     .lr = std::isnan(part.lr) ? spec->optimizer.lr : part.lr,
                     .keys = numbers,
                     .values = *values,
                     .version_read = part.version,
                     .by_staleness = (frame.header.flags & kByStaleness) != 0,
                     .dc_lambda = part.dc_lambda,
                     .pulled = pulled});
    if (Status status = check_part(*spec, parts.back(), staged); !status.ok()) return status;
  }
  return {};
}

Session::Outcome Session::push(const FrameView& frame, ReplySink& sink) {
  std::vector<PushPart> parts;
  std::vector<std::vector<int64_t>> copies;
  parts.reserve(frame.parts.size());
  if (frame.header.seq >= frame.header.low + kOpenPushesMax) {  // some shards may know a higher low
    return answer(frame,
                  {Code::refused, "push " + std::to_string(frame.header.seq) + " is outside the window of " +
                                      std::to_string(kOpenPushesMax) + " open pushes"},
                  sink);
  }
  if (Status status = check_push(frame, parts, copies); !status.ok()) return answer(frame, status, sink);
  const Result<Groups> found = groups_of(frame.parts);
  if (!found.ok()) return answer(frame, found.status(), sink);
  const Groups& groups = *found;
  const size_t rows =
      std::accumulate(parts.begin(), parts.end(), size_t{0},
                      [](size_t sum, const PushPart& part) { return sum + part.keys.size(); });
  const PushIdentity identity{
      .client = client_, .incarnation = incarnation_, .seq = frame.header.seq, .low = frame.header.low};
  std::vector<Ack> acks(groups.size());
  const auto apply = [&](size_t g) {
    const auto [first, last] = groups[g];
    Shard& shard = server_.store.shard(frame.parts[first].shard);
    const auto mine = std::span(parts).subspan(first, last - first);
    acks[g] = (frame.header.flags & kStage) != 0
                  ? shard.stage(&identity, mine, frame.header.rank, frame.header.step)
                  : shard.push(&identity, mine, frame.header.step);
  };
  server_.crew.run(groups.size(), apply, rows < kHelpRows);
  server_.counters.pushes += 1;
  server_.counters.rows_pushed += rows;
  for (const Ack& ack : acks) server_.counters.duplicates += ack.duplicate ? 1 : 0;
  if (!server_.chain.in_use()) {
    return answer_parts(
        frame, acks, [&](size_t g) -> const Part& { return frame.parts[groups[g].first]; }, sink);
  }
  if (server_.chain.goes_on(frame.parts)) {
    Header header = frame.header;
    header.kind = static_cast<uint16_t>(Kind::replicate_push);
    header.origin = client_;
    header.origin_incarnation = incarnation_;
    header.origin_seq = frame.header.seq;
    header.origin_low = frame.header.low;
    send_on(header, frame.parts, parts, groups, acks);
  }
  Status failed;
  std::vector<Part> marks;
  std::vector<Part> replies;
  for (size_t g = 0; g < acks.size(); ++g) {
    replies.push_back(reply_part(frame.parts[groups[g].first], acks[g]));
    set_log_entry(replies.back(), acks[g].status.ok() ? acks[g].entry : 0);
    marks.push_back(replies.back());
    replies.back().samples = server_.chain.unheld(replies.back().shard);
    if (failed.ok()) failed = acks[g].status;
  }
  answer_when_held(frame.header, std::move(marks), std::move(replies), failed);
  return Outcome::done;
}

Result<PullPart> Session::check_pull(const FrameView& frame, const Part& part) const {
  if (part.shard >= server_.store.shards() || !is_codec(part.codec) || part.keys_at % 2 != 0) {
    return Status{Code::refused, "a pull names shard " + std::to_string(part.shard) + ", codec " +
                                     std::to_string(part.codec)};
  }
  const auto keys = array(frame, part.keys_segment, part.keys_at, size_t{8} * part.count);
  if (!keys.ok()) return keys.status();
  const bool any_copy = part.mode == kAnyCopy;
  if (Status status = server_.store.shard(part.shard).check_pull(part.term, any_copy); !status.ok())
    return status;
  return PullPart{.table = part.table,
                  .term = part.term,
                  .any_copy = any_copy,
                  .keys = {reinterpret_cast<const int64_t*>(keys->data()), part.count}};
}

// Answers in frames of about kReplyBytes, and stops where the sink has no room: the next call goes on
// with the row where this one stopped.
Session::Outcome Session::pull(const FrameView& frame, ReplySink& sink) {
  if (!frame.parts.empty() && frame.parts[0].values_segment != 0) return pull_into_segments(frame, sink);
  do {
    if (!sink.room()) return Outcome::later;
    const Result<std::vector<PullPiece>> pieces = next_pieces(frame);
    if (!pieces.ok()) {
      progress_ = {};
      return answer(frame, pieces.status(), sink);
    }
    send_pieces(frame, *pieces, sink);
  } while (progress_.part < frame.parts.size());
  progress_ = {};
  ++server_.counters.pulls;
  return Outcome::done;
}

// The rows of the next reply frame, and moves `progress_` behind them.
Result<std::vector<Session::PullPiece>> Session::next_pieces(const FrameView& frame) {
  std::vector<PullPiece> pieces;
  TableFinder tables(server_.store);
  size_t body = 0;
  while (progress_.part < frame.parts.size() && body < kReplyBytes && pieces.size() < kPartsMax) {
    const Part& part = frame.parts[progress_.part];
    const TableSpec* spec = tables.find(part.table);
    if (spec == nullptr) return not_declared(part.table);
    Result<PullPart> request = check_pull(frame, part);
    if (!request.ok()) return request.status();
    if (part.keys_segment != 0)
      return Status{Code::refused, "keys in shared memory go with rows in shared memory"};
    const Codec codec = static_cast<Codec>(part.codec);
    const size_t room = std::max<size_t>(1, kPieceBytes / encoded_bytes(codec, spec->floats(0)));
    const size_t rows = std::min(request->keys.size() - progress_.row, room);
    request->keys = request->keys.subspan(progress_.row, rows);
    const std::optional<size_t> exact = spec->rows_bytes(request->keys, codec);
    if (!exact) return Status{Code::refused, describe(*spec) + " has no such piece"};
    // Offsets count in fours, and rows of an odd dim in 16 bits need not end on one.
    const size_t bytes = round_up(*exact, 4);
    pieces.push_back({&part, *request, part.samples + progress_.row, body, bytes});
    body += bytes;
    progress_.row += rows;
    if (progress_.row == part.count) progress_ = {.part = progress_.part + 1, .row = 0};
  }
  return pieces;
}

void Session::send_pieces(const FrameView& frame, const std::vector<PullPiece>& pieces, ReplySink& sink) {
  size_t body = 0;
  for (const PullPiece& piece : pieces) body += piece.bytes;
  const ReplySink::Draft draft = sink.begin(pieces.size(), body);
  std::vector<Ack> acks(pieces.size());
  const std::function<void(size_t)> gather = [&](size_t i) {
    const PullPiece& piece = pieces[i];
    std::byte* out = draft.body + piece.at;
    if (piece.bytes >= 4)
      std::memset(out + piece.bytes - 4, 0, 4);  // what rounding up to fours may leave unwritten
    const PullTarget target{.out = out, .codec = static_cast<Codec>(piece.part->codec)};
    acks[i] = pull_shown(piece.part->shard, piece.request, target);
  };
  server_.crew.run(pieces.size(), gather, body < kHelpBytes);
  Header reply = reply_header(frame.header);
  for (size_t i = 0; i < pieces.size(); ++i) {
    const PullPiece& piece = pieces[i];
    if (const Status& status = acks[i].status; !status.ok()) {
      std::memset(draft.body, 0, body);
      std::memcpy(draft.body, status.message().data(), std::min(status.message().size(), body));
      reply.code = static_cast<uint16_t>(status.code());
      break;
    }
    draft.parts[i] = reply_part(*piece.part, acks[i]);
    draft.parts[i].count = static_cast<uint32_t>(piece.request.keys.size());
    draft.parts[i].keys_at = static_cast<uint32_t>(piece.first);
    draft.parts[i].values_at = static_cast<uint32_t>(piece.at / 4);
    server_.counters.rows_pulled += piece.request.keys.size();
  }
  reply.last = progress_.part == frame.parts.size() ? 1 : 0;
  sink.finish(reply);
}

Session::Outcome Session::pull_into_segments(const FrameView& frame, ReplySink& sink) {
  struct Job {
    PullPart request;
    PullTarget target;
  };
  std::vector<Job> jobs;
  jobs.reserve(frame.parts.size());
  TableFinder tables(server_.store);
  size_t rows = 0;
  for (const Part& part : frame.parts) {
    const TableSpec* spec = tables.find(part.table);
    if (spec == nullptr) return answer(frame, not_declared(part.table), sink);
    const Result<PullPart> request = check_pull(frame, part);
    const size_t room = spec->dense ? size_t{4} * spec->dim : size_t{4} * spec->dim * part.positions_end;
    const auto out = array(frame, part.values_segment, part.values_at, room);
    const auto positions = array(frame, part.keys_segment, part.positions_at, size_t{4} * part.count);
    const bool plain = part.codec == 0 && part.values_segment != 0;
    if (!request.ok()) return answer(frame, request.status(), sink);
    if (!out.ok()) return answer(frame, out.status(), sink);
    if (!spec->dense && !positions.ok()) return answer(frame, positions.status(), sink);
    if (!plain) return answer(frame, {Code::refused, "shared memory takes fp32 only"}, sink);
    rows += part.count;
    // The segment is the client's own memory, mapped writable; `array` only checked the bounds.
    PullTarget target{.out = const_cast<std::byte*>(out->data())};
    target.positions = spec->dense ? nullptr : reinterpret_cast<const uint32_t*>(positions->data());
    target.positions_end = part.positions_end;
    target.in_place = spec->dense;
    target.stream = room >= kStreamBytesMin;
    jobs.push_back({*request, target});
  }
  std::vector<Ack> acks(jobs.size());
  const auto gather = [&](size_t i) {
    acks[i] = pull_shown(frame.parts[i].shard, jobs[i].request, jobs[i].target);
  };
  server_.crew.run(jobs.size(), gather, rows < kHelpRows && (jobs.empty() || !jobs[0].target.in_place));
  ++server_.counters.pulls;
  server_.counters.rows_pulled += rows;
  return answer_parts(frame, acks, [&](size_t i) -> const Part& { return frame.parts[i]; }, sink);
}

Session::Outcome Session::scan(const FrameView& frame, ReplySink& sink) {
  if (frame.parts.size() != 1 || frame.parts[0].shard >= server_.store.shards())
    return answer(frame, {Code::refused, "a scan names one shard"}, sink);
  const Part& part = frame.parts[0];
  if (Status status = server_.store.shard(part.shard).check_pull(part.term, false); !status.ok())
    return answer(frame, status, sink);
  const auto spec = server_.store.table(part.table);
  const size_t row_bytes = spec == nullptr ? 8 : 8 + 4 * spec->dim;
  const size_t rows_max = std::clamp<size_t>(kScanBytes / row_bytes, 1, std::max<uint32_t>(part.count, 1));
  Result<ScanPage> page = server_.store.shard(part.shard).scan(part.table, part.version, rows_max);
  if (!page.ok()) return answer(frame, page.status(), sink);
  const size_t key_bytes = page->keys.size() * 8;
  const size_t value_bytes = page->values.size() * 4;
  const ReplySink::Draft draft = sink.begin(1, key_bytes + value_bytes);
  if (key_bytes > 0) {
    std::memcpy(draft.body, page->keys.data(), key_bytes);
    std::memcpy(draft.body + key_bytes, page->values.data(), value_bytes);
  }
  draft.parts[0] = part;
  draft.parts[0].count = static_cast<uint32_t>(page->keys.size());
  draft.parts[0].version = page->next.value_or(0);
  draft.parts[0].values_at = static_cast<uint32_t>(key_bytes / 4);
  sink.finish(reply_header(frame.header));
  return Outcome::done;
}

// Sends a commit to the servers behind, for the shards that have just applied it. Gives what is to be held.
std::vector<Part> Session::send_on(std::span<const std::byte> commit, std::span<const Ack> acks) {
  Header header;
  header.kind = static_cast<uint16_t>(Kind::replicate_commit);
  std::vector<Chain::Entry> entries;
  std::vector<Part> marks;
  const auto bytes = std::make_shared<const std::vector<std::byte>>(commit.begin(), commit.end());
  for (size_t s = 0; s < acks.size(); ++s) {
    Part part;
    part.shard = static_cast<uint16_t>(s);
    part.term = acks[s].term;
    set_log_entry(part, acks[s].entry);
    if (acks[s].status.ok()) marks.push_back(part);
    if (!acks[s].status.ok() || acks[s].duplicate || SHOAL_MUTANT(commit_alone)) continue;
    if (acks[s].settings.empty()) {
      entries.push_back({{part}, bytes});
      continue;
    }
    auto with_settings = std::make_shared<std::vector<std::byte>>(commit.begin(), commit.end());
    append_tables(acks[s].settings, *with_settings);
    header.flags = kSettings;
    server_.chain.send(header, {{{part}, Chain::Bytes(std::move(with_settings))}});
  }
  header.flags = 0;
  server_.chain.send(header, std::move(entries));
  return marks;
}

Session::Outcome Session::commit(const FrameView& frame, ReplySink& sink) {
  Commit commit;
  std::span<const std::byte> body = frame.body;
  if (!decode_commit(body, commit)) return answer(frame, {Code::refused, "these bytes are no commit"}, sink);
  if (!knows_placement(frame)) return answer(frame, other_placement(frame), sink);
  if (frame.header.kind == static_cast<uint16_t>(Kind::commit)) {
    std::vector<Ack> acks;
    const bool chained = server_.chain.in_use();
    Status status = server_.store.commit(commit, server_.crew, acks, chained);
    // Sent on whatever became of the placement: asked again, it is a duplicate here, which nobody sends.
    std::vector<Part> marks = server_.chain.in_use() ? send_on(frame.body, acks) : std::vector<Part>{};
    // A shard that came or went meanwhile was passed over: asked again, it is done by whoever has it.
    if (!knows_placement(frame) || chained != server_.chain.in_use())
      return answer(frame, other_placement(frame), sink);
    if (!chained) return answer(frame, status, sink);
    answer_when_held(frame.header, std::move(marks), {}, status);
    return Outcome::done;
  }
  const double norm = server_.store.norm(commit, server_.crew);
  if (!knows_placement(frame)) return answer(frame, other_placement(frame), sink);
  sink.send(reply_header(frame.header), std::as_bytes(std::span(&norm, 1)));
  return Outcome::done;
}

Session::Outcome Session::sync(const FrameView& frame, ReplySink& sink) {
  std::optional<SyncRequest> request = decode_sync(frame.body);
  if (!request || mail_ == nullptr)
    return answer(frame, {Code::refused, "these bytes are no sync request"}, sink);
  const uint32_t term = server_.store.shard(0).term();
  if (!knows_placement(frame)) return answer(frame, other_placement(frame), sink);
  request->client = client_;
  request->incarnation = incarnation_;
  const auto deliver = [&server = server_, mail = mail_, session = number_,
                        header = frame.header](const SyncReply& reply) {
    const auto text = std::as_bytes(std::span(reply.status.message()));
    Header answer = reply_header(header, reply.status);
    // Whoever is let go on reads by this placement or a newer one: a server that slept, was replaced and does
    // not know it yet would give it rows of the past.
    answer.member_term = server.placement;
    mail->post({session,
                answer,
                {},
                reply.status.ok() ? encode_sync_reply(reply) : std::vector(text.begin(), text.end())});
  };
  SyncDesk::Handled handled = server_.sync.ask(*request, deliver);
  if (!knows_placement(frame)) server_.sync.turn_away();  // it may have been asked behind the last of them
  if (!server_.chain.in_use()) {
    handled.deliver(true);
    return Outcome::done;
  }
  Header header;
  header.kind = static_cast<uint16_t>(Kind::replicate_sync);
  header.origin = client_;
  header.origin_incarnation = incarnation_;
  header.step = std::bit_cast<uint64_t>(handled.now);
  Part mark;
  mark.shard = kSyncLog;
  mark.term = term;
  set_log_entry(mark, handled.entry);
  server_.chain.send(
      header,
      {{{mark}, std::make_shared<const std::vector<std::byte>>(frame.body.begin(), frame.body.end())}});
  server_.chain.when_held(
      {&mark, 1}, [handled = std::move(handled)](const auto& lost) { handled.deliver(lost.empty()); });
  return Outcome::done;
}

Session::Outcome Session::figures(const FrameView& frame, ReplySink& sink) {
  if (!knows_placement(frame)) return answer(frame, other_placement(frame), sink);
  if (frame.parts.size() == 1 && frame.parts[0].table == 0) {
    const StoreFigures all = server_.store.figures();
    sink.send(reply_header(frame.header), std::as_bytes(std::span(&all, 1)));
    return Outcome::done;
  }
  if (frame.parts.size() != 1 || server_.store.table(frame.parts[0].table) == nullptr)
    return answer(frame, {Code::unknown_table, "figures were asked for a table that was not declared"}, sink);
  const Result<TableFigures> sum = server_.store.figures(frame.parts[0].table);
  if (!sum.ok()) return answer(frame, sum.status(), sink);
  sink.send(reply_header(frame.header), std::as_bytes(std::span(&*sum, 1)));
  return Outcome::done;
}

}  // namespace shoal
