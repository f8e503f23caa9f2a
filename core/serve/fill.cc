#include "serve/fill.h"

#include <cstring>

namespace shoal {
namespace {

constexpr size_t kPageBytes = size_t{1} << 20;   // read under the shard's mutex
constexpr size_t kBytesOpen = size_t{16} << 20;  // on their way

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

Status fill_replica(ServerState& server, uint32_t shard, uint32_t target,
                    std::chrono::steady_clock::time_point deadline) {
  Shard& source = server.store.shard(shard);
  const uint32_t term = source.term();
  Chain& chain = server.chain;
  // First: what is declared and pushed from here on also goes to the target.
  const Chain::FillPtr fill = chain.begin_fill(static_cast<uint16_t>(shard), target, term);
  const auto send = [&](const Chain::FillPtr& to, Kind kind, std::vector<Part> parts, Bytes body) {
    chain.send_image(to, header_of(kind), std::move(parts), std::make_shared<const Bytes>(std::move(body)));
  };
  for (const auto& spec : server.store.tables()) send(fill, Kind::declare, {}, encode_table(*spec));
  Part part;
  part.shard = static_cast<uint16_t>(shard);
  part.term = term;
  Chain::FillPtr sync_fill;
  if (shard == 0) {  // the sync shard goes with it; it is small, and sent as one
    sync_fill = chain.begin_fill(kSyncLog, target, term);
    SyncDesk::Image sync = server.sync.image(true);
    Part whole = part;
    whole.shard = kSyncLog;
    set_log_entry(whole, sync.entry);
    send(sync_fill, Kind::image, {whole}, std::move(sync.bytes));
    if (Status status = chain.wait_for(sync_fill, 0, false, deadline); !status.ok()) return status;
    chain.image_sent(sync_fill, sync.entry);
  }
  Shard::ImageHead head = source.begin_image();
  send(fill, Kind::image, {part}, std::move(head.bytes));
  Status status;
  for (;;) {
    status = chain.wait_for(fill, kBytesOpen, false, deadline);
    if (!status.ok()) break;
    Result<ImagePage> page = source.read_image(head.id, kPageBytes);
    status = page.status();
    if (!status.ok() || page->keys.empty()) break;
    part.table = page->table;
    part.count = static_cast<uint32_t>(page->keys.size());
    part.values_words = static_cast<uint32_t>(page->rows.size());
    send(fill, Kind::image, {part}, encode_page(*page));
  }
  source.end_image(head.id);
  // A page that is sent again after a lost connection must not come behind an entry.
  if (status.ok()) status = chain.wait_for(fill, 0, false, deadline);
  if (status.ok()) {
    chain.image_sent(fill, head.entry);
    status = chain.wait_for(fill, 0, true, deadline);
  }
  if (status.ok() && sync_fill != nullptr) status = chain.wait_for(sync_fill, 0, true, deadline);
  return status;
}

}  // namespace shoal
