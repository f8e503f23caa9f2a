#include "serve/fill.h"

#include <condition_variable>
#include <cstring>

namespace shoal {
namespace {

constexpr size_t kPageBytes = size_t{1} << 20;  // read under the shard's mutex

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

// What the caller waits for; shared with an end that comes too late.
struct Latch {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
};

Header header_of(Kind kind) {
  Header header;
  header.kind = static_cast<uint16_t>(kind);
  return header;
}

}  // namespace

Status fill_replica(ServerState& server, uint32_t shard, uint32_t target,
                    std::chrono::steady_clock::time_point deadline) {
  const Status late{Code::timeout, "server " + std::to_string(target) + " was not filled with shard " +
                                       std::to_string(shard) + " in time"};
  const auto number = static_cast<uint16_t>(shard);
  Shard& source = server.store.shard(shard);
  const uint32_t term = source.term();
  const auto send = [&](Kind kind, std::vector<Part> parts, Bytes body) {
    server.chain.send_image(target, header_of(kind), std::move(parts),
                            std::make_shared<const Bytes>(std::move(body)));
  };
  Part part;
  part.shard = number;
  part.term = term;
  for (const auto& spec : server.store.tables()) send(Kind::declare, {}, encode_table(*spec));
  server.chain.begin_fill(number, target, term);
  if (shard == 0) server.chain.begin_fill(kSyncLog, target, term);
  uint64_t entry = 0;
  send(Kind::image, {part}, source.begin_image(&entry));
  if (shard == 0) {  // the sync shard goes with it; it is small, and sent as one
    SyncDesk::Image sync = server.sync.image(true);
    Part whole = part;
    whole.shard = kSyncLog;
    set_log_entry(whole, sync.entry);
    send(Kind::image, {whole}, std::move(sync.bytes));
    server.chain.image_sent(kSyncLog, sync.entry, {});
  }
  for (;;) {
    if (!server.chain.has_room(target, deadline)) {
      source.end_image();
      return late;
    }
    Result<ImagePage> page = source.read_image(kPageBytes);
    if (!page.ok()) return page.status();
    if (page->keys.empty()) break;
    part.table = page->table;
    part.count = static_cast<uint32_t>(page->keys.size());
    part.values_words = static_cast<uint32_t>(page->rows.size());
    send(Kind::image, {part}, encode_page(*page));
  }
  const auto latch = std::make_shared<Latch>();
  server.chain.image_sent(number, entry, [latch](const std::vector<uint16_t>&) {
    const std::lock_guard lock(latch->mutex);
    latch->done = true;
    latch->changed.notify_all();
  });
  std::unique_lock lock(latch->mutex);
  return latch->changed.wait_until(lock, deadline, [&] { return latch->done; }) ? Status{} : late;
}

}  // namespace shoal
