#include "serve/fill.h"

#include <cstring>

namespace shoal {
namespace {

constexpr size_t kPageBytes = size_t{256} << 10;  // read under the shard's mutex
constexpr size_t kBytesOpen = size_t{1} << 20;    // on their way: pushes to the target wait behind them

using Bytes = std::vector<std::byte>;

Bytes encode_page(const ImagePage& page) {
  Bytes bytes(page.keys.size() * (sizeof(int64_t) + sizeof(RowMeta)) + 4 * page.rows.size());
  std::byte* at = bytes.data();
  const auto put = [&at](const auto& values) {
    const auto raw = std::as_bytes(std::span(values));
    if (!raw.empty()) std::memcpy(at, raw.data(), raw.size());
    at += raw.size();
  };
  put(page.keys);
  put(page.metas);
  put(page.rows);
  return bytes;
}

Header header_of(Kind kind) {
  Header header;
  header.kind = static_cast<uint16_t>(kind);
  return header;
}

}  // namespace

Filler::Filler(ServerState& server, uint32_t shard, uint32_t target, uint32_t term)
    : server_(server), chain_(server.chain), source_(server.store.shard(shard)), target_(target) {
  part_.shard = static_cast<uint16_t>(shard);
  part_.term = term;
}

Filler::~Filler() {
  if (reading_) source_.end_image(image_.id);
}

void Filler::send(const Chain::FillPtr& to, Kind kind, std::vector<Part> parts, Bytes body) {
  chain_.send_image(to, header_of(kind), std::move(parts), std::make_shared<const Bytes>(std::move(body)));
}

void Filler::begin() {
  for (const auto& spec : server_.store.tables()) send(fill_, Kind::declare, {}, encode_table(*spec));
  if (sync_fill_ != nullptr) {  // small, and sent as one
    SyncDesk::Image sync = server_.sync.image(true);
    Part whole = part_;
    whole.shard = kSyncLog;
    set_log_entry(whole, sync_entry_ = sync.entry);
    send(sync_fill_, Kind::image, {whole}, std::move(sync.bytes));
  }
  image_ = source_.begin_image();
  reading_ = true;
  // Shards may know of a table before the store lists it.
  for (const auto& spec : image_.settings) send(fill_, Kind::declare, {}, encode_table(*spec));
  Bytes head;
  append_tables(image_.settings, head);
  head.insert(head.end(), image_.bytes.begin(), image_.bytes.end());
  send(fill_, Kind::image, {part_}, std::move(head));
}

// Ok: all of them are sent.
Status Filler::send_pages() {
  while (chain_.state(fill_).bytes <= kBytesOpen) {
    Result<ImagePage> page = source_.read_image(image_.id, kPageBytes);
    if (!page.ok()) return {Code::internal, page.status().message()};  // such as another image of the shard
    if (page->keys.empty()) return {};
    Part part = part_;
    part.table = page->table;
    part.count = static_cast<uint32_t>(page->keys.size());
    part.values_words = static_cast<uint32_t>(page->rows.size());
    send(fill_, Kind::image, {part}, encode_page(*page));
  }
  return {Code::unavailable, "more than enough is on its way"};
}

Status Filler::advance() {
  const Status not_yet{Code::unavailable, "the target has yet to answer"};
  if (phase_ == Phase::begin) {
    // First: what is declared and pushed from here on also goes to the target.
    fill_ = chain_.begin_fill(part_.shard, target_, part_.term);
    if (fill_ != nullptr && part_.shard == 0) sync_fill_ = chain_.begin_fill(kSyncLog, target_, part_.term);
    if (fill_ == nullptr || (part_.shard == 0 && sync_fill_ == nullptr))
      return {Code::moved, "the shard was placed anew before it could be sent"};
    begin();
    phase_ = sync_fill_ != nullptr ? Phase::sync : Phase::pages;
  }
  for (const Chain::FillPtr& fill : {fill_, sync_fill_})
    if (fill != nullptr && !chain_.state(fill).failed.ok()) return chain_.state(fill).failed;
  if (phase_ == Phase::sync) {
    if (chain_.state(sync_fill_).open > 0) return not_yet;
    chain_.image_sent(sync_fill_, sync_entry_);
    phase_ = Phase::pages;
  }
  if (phase_ == Phase::pages) {
    if (Status status = send_pages(); !status.ok()) return status;
    source_.end_image(image_.id);
    reading_ = false;
    phase_ = Phase::drain;
  }
  if (phase_ == Phase::drain) {
    // A page that is sent again after a lost connection must not come behind an entry.
    if (chain_.state(fill_).open > 0) return not_yet;
    chain_.image_sent(fill_, image_.entry);
    phase_ = Phase::end;
  }
  const bool done = chain_.state(fill_).done && (sync_fill_ == nullptr || chain_.state(sync_fill_).done);
  return done ? Status{} : not_yet;
}

void Filler::give_up() {
  for (const Chain::FillPtr& fill : {fill_, sync_fill_})
    if (fill != nullptr) chain_.give_up(fill);
}

Status Filler::step() {
  Status status = advance();
  if (!status.ok() && status.code() != Code::unavailable) give_up();
  return status;
}

Status fill_replica(ServerState& server, uint32_t shard, uint32_t target, uint32_t term,
                    std::chrono::steady_clock::time_point deadline) {
  Filler filler(server, shard, target, term);
  for (;;) {
    const uint64_t answers = server.chain.answers();
    Status status = filler.step();
    if (status.code() != Code::unavailable) return status;
    if (!server.chain.wait_for_answer(answers, deadline)) {
      filler.give_up();
      return {Code::timeout, "server " + std::to_string(target) + " was not filled with shard " +
                                 std::to_string(shard) + " in time"};
    }
  }
}

}  // namespace shoal
