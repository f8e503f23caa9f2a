// A shard as bytes: its image, read page by page while pushes go on, and what becomes of one elsewhere.
#include <algorithm>
#include <array>
#include <bit>

#include "base/mutants.h"
#include "store/shard.h"
#include "wire/pack.h"

namespace shoal {
namespace {

constexpr uint64_t kRejoined = uint64_t{1} << 63;  // in an image, beside the number of the last commit

}  // namespace

Shard::ImageHead Shard::begin_image() {
  const std::lock_guard lock(mutex_);
  imaged_.clear();
  ImageHead head{.id = ++image_, .entry = entries_, .bytes = {}, .settings = {}};
  for (auto& [id, entry] : tables_) {
    std::visit([](auto& rows) { rows.begin_image(); }, entry.rows);
    head.settings.push_back(std::visit([](const auto& rows) { return rows.shared_spec(); }, entry.rows));
    imaged_.push_back(id);
  }
  const uint64_t commits = committed_ | (rejoined_ ? kRejoined : 0);
  const uint64_t numbers[] = {entries_,       version_,       commits, staleness_.count,
                              staleness_.sum, staleness_.max, normed_, std::bit_cast<uint64_t>(norm_)};
  pack(head.bytes, numbers, 8);
  (SHOAL_MUTANT(image_without_records) ? Dedupe{} : dedupe_).encode(head.bytes);
  staging_.encode(head.bytes);
  return head;
}

Result<ImagePage> Shard::read_image(uint64_t id, size_t bytes_max) {
  const std::lock_guard lock(mutex_);
  if (id != image_) {
    return Status{Code::unavailable, "another image of shard " + std::to_string(number_) +
                                         " was begun, or the shard was replaced"};
  }
  ImagePage page;
  while (page.keys.empty() && !imaged_.empty()) {
    Entry& entry = *find(page.table = imaged_.back());
    if (std::visit([](const auto& rows) { return rows.image_broken(); }, entry.rows)) return out_of_memory();
    auto* table = std::get_if<TableRows>(&entry.rows);
    const size_t row_bytes = 4 * size_t{entry.spec().floats(0)};
    const bool more = table != nullptr ? table->read_image(std::max<size_t>(1, bytes_max / row_bytes), page)
                                       : std::get<DensePieces>(entry.rows).read_image(page);
    if (more) continue;
    std::visit([](auto& rows) { rows.end_image(); }, entry.rows);
    imaged_.pop_back();
  }
  return page;
}

void Shard::end_image(uint64_t id) {
  const std::lock_guard lock(mutex_);
  if (id != image_) return;
  for (const uint32_t table : imaged_) std::visit([](auto& rows) { rows.end_image(); }, find(table)->rows);
  imaged_.clear();
}

Status Shard::restore(std::span<const std::byte> head) {
  const std::lock_guard lock(mutex_);
  std::array<uint64_t, 8> numbers{};
  const auto spec = [&](uint32_t table) {
    const Entry* entry = find(table);
    return entry == nullptr ? nullptr : &entry->spec();
  };
  if (!unpack(head, numbers) || !dedupe_.decode(head) || !staging_.decode(head, spec) || !head.empty())
    return {Code::refused, "this is not the head of a shard's image"};
  entries_ = numbers[0];
  version_ = numbers[1];
  committed_ = numbers[2] & ~kRejoined;
  rejoined_ = (numbers[2] & kRejoined) != 0;
  staleness_ = {numbers[3], numbers[4], numbers[5]};
  normed_ = numbers[6];
  norm_ = std::bit_cast<double>(numbers[7]);
  return {};
}

Status Shard::restore(const Settings& settings) {
  const std::lock_guard lock(mutex_);
  if (Status status = check(settings); !status.ok()) return status;
  adopt(settings);
  return {};
}

void Shard::clear() {
  const std::lock_guard lock(mutex_);
  tell_settings();
  for (auto& [id, entry] : tables_) {
    const auto spec = std::visit([](const auto& rows) { return rows.shared_spec(); }, entry.rows);
    spec->dense ? void(entry.rows.emplace<DensePieces>(spec)) : void(entry.rows.emplace<TableRows>(spec));
  }
  imaged_.clear();
  ++image_;
}

void Shard::skip_commits(uint64_t seq) {
  const std::lock_guard lock(mutex_);
  committed_ = std::max(committed_, seq);
}

void Shard::rejoin() {
  const std::lock_guard lock(mutex_);
  staging_.drop_unfinished({});
  rejoined_ = true;
}

void Shard::drop_unfinished(std::span<const uint64_t> clocks) {
  const std::lock_guard lock(mutex_);
  staging_.drop_unfinished(clocks);
}

Status Shard::restore(const ImagePage& page) {
  const std::lock_guard lock(mutex_);
  Entry* entry = find(page.table);
  if (entry == nullptr) return unknown(page.table);
  for (const RowMeta& meta : page.metas) version_ = std::max(version_, meta.version);
  if (std::visit([&](auto& rows) { return rows.restore(page); }, entry->rows)) return {};
  return {Code::refused, describe(entry->spec()) + ": a page of its image does not fit, or memory is out"};
}

}  // namespace shoal
