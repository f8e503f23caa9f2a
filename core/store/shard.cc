#include "store/shard.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cassert>
#include <cmath>

#include "base/mutants.h"

namespace shoal {

TableFigures& TableFigures::operator+=(const TableFigures& other) {
  rows += other.rows;
  value_bytes += other.value_bytes;
  state_bytes += other.state_bytes;
  memory_bytes += other.memory_bytes;
  pushes += other.pushes;
  pulls += other.pulls;
  return *this;
}

Shard::Entry* Shard::find(uint32_t table) {
  const auto it = tables_.find(table);
  return it == tables_.end() ? nullptr : &it->second;
}

Status Shard::unknown(uint32_t table) const {
  return {Code::unknown_table,
          "shard " + std::to_string(number_) + " knows no table with id " + std::to_string(table)};
}

Status Shard::declare(const std::shared_ptr<const TableSpec>& spec) {
  const std::lock_guard lock(mutex_);
  if (Entry* entry = find(spec->id)) {
    const TableSpec& now = entry->spec();
    if (!same_table(now, *spec))
      return {Code::mismatch, describe(now) + " exists; it cannot be opened as " + describe(*spec)};
    if (spec->generation <= entry->newest->generation) return {};
    entry->newest = spec;
    if (SHOAL_MUTANT(settings_at_once)) adopt({spec});
    return {};
  }
  tables_.emplace(spec->id, spec->dense ? Entry{DensePieces(spec), spec} : Entry{TableRows(spec), spec});
  return {};
}

Status Shard::check(const Settings& settings) {
  for (const auto& spec : settings) {
    const Entry* entry = find(spec->id);
    if (entry == nullptr) return unknown(spec->id);
    if (!same_table(entry->spec(), *spec))
      return {Code::mismatch, describe(entry->spec()) + " is here; a server sends " + describe(*spec)};
  }
  return {};
}

void Shard::adopt(const Settings& settings) {
  for (const auto& spec : settings) {
    Entry& entry = *find(spec->id);
    std::visit([&](auto& rows) { rows.set_spec(spec); }, entry.rows);
    if (spec->generation > entry.newest->generation) entry.newest = spec;
    entry.told = false;  // until the update is made
  }
}

void Shard::made_with(const Settings& settings) {
  for (const auto& spec : settings) find(spec->id)->told = true;
}

void Shard::tell_settings() {
  for (auto& [id, entry] : tables_) entry.told = false;
}

template <typename Parts>
Settings Shard::changed(const Parts& parts) {
  Settings settings;
  for (const auto& part : parts) {
    const Entry& entry = *find(part.table);
    const bool told = entry.told && entry.newest->generation <= entry.spec().generation;
    const auto is_same = [&](const auto& spec) { return spec->id == part.table; };
    if (!told && std::none_of(settings.begin(), settings.end(), is_same)) settings.push_back(entry.newest);
  }
  return settings;
}

bool Shard::place(const ChainPlace& place) {
  const std::lock_guard lock(mutex_);
  const bool left = place.term >= place_.term && place_.member && !place.member;
  if (place.term < place_.term) return false;
  if (place.head && !place_.head) began_ = {place.term, version_, entries_};
  if (place.head) tell_settings();
  place_ = place;
  return left;
}

Shard::Began Shard::began() {
  const std::shared_lock lock(mutex_);
  return began_;
}

// Whether the log goes on with this entry, a client's (0) or the one of the server before.
Ack Shard::begin(uint32_t term, uint64_t entry) {
  Ack ack{.status = {}, .term = place_.term, .version = version_, .entry = entries_};
  const bool known =
      entry == 0 ? place_.head && term == place_.term : term >= place_.term || SHOAL_MUTANT(accept_old_term);
  if (!known) {
    ack.status = {Code::moved, "shard " + std::to_string(number_) + " is at term " +
                                   std::to_string(place_.term) + (place_.head ? "" : ", headed by another") +
                                   "; the request names term " + std::to_string(term)};
  } else if (entry != 0) {
    place_.term = std::max(place_.term, term);
    ack.duplicate = entry <= entries_;
    if (entry > entries_ + 1 && !SHOAL_MUTANT(entries_out_of_turn))
      ack.status = {Code::unavailable, "entry " + std::to_string(entry) + " came before its turn"};
  }
  return ack;
}

Status Shard::readable(uint32_t term, bool any_copy) const {
  const bool here = place_.reads || (any_copy && place_.member);
  if (here && term == place_.term) return {};
  return {Code::moved, "shard " + std::to_string(number_) + " is at term " + std::to_string(place_.term) +
                           (here ? "" : ", and is read elsewhere") + "; the request names term " +
                           std::to_string(term)};
}

void Shard::unplace() {
  const std::lock_guard lock(mutex_);
  place_ = {.term = 0, .head = false, .reads = false, .next = kNobody, .member = false};
}

Ack Shard::reached(uint64_t entry) {
  const std::shared_lock lock(mutex_);
  Ack ack{.status = {}, .term = place_.term, .version = version_, .duplicate = true, .entry = entry};
  if (entries_ < entry) ack.status = {Code::unavailable, "the log is not there yet"};
  return ack;
}

uint32_t Shard::term() {
  const std::shared_lock lock(mutex_);
  return place_.term;
}

Status Shard::check_sender(uint32_t term) {
  const std::lock_guard lock(mutex_);
  if (term >= place_.term || SHOAL_MUTANT(image_of_old_term)) {
    // From here on nothing of an older term is heard, also where this server has yet to learn the placement.
    place_.term = std::max(place_.term, term);
    return {};
  }
  return {Code::moved, "shard " + std::to_string(number_) + " is at term " + std::to_string(place_.term) +
                           "; a server sends of term " + std::to_string(term)};
}

Status Shard::check_pull(uint32_t term, bool any_copy) {
  const std::shared_lock lock(mutex_);
  return readable(term, any_copy);
}

Ack Shard::logged(Ack ack) {
  ack.entry = ++entries_;
  return ack;
}

Status check_part(const TableSpec& spec, const PushPart& part, bool staged) {
  const std::optional<size_t> bytes = spec.rows_bytes(part.keys, part.codec);
  // The wire counts a tensor's bytes in fours.
  if (!bytes || (spec.dense ? round_up(*bytes, 4) : *bytes) != part.values.size()) {
    return {Code::refused, describe(spec) + ": " + std::to_string(part.keys.size()) +
                               " keys do not go with " + std::to_string(part.values.size()) +
                               " bytes of values"};
  }
  if (staged && (part.mode != PushMode::update || part.dc_lambda != 0.0f))
    return {Code::refused, "only plain gradients wait for a commit"};
  if (part.mode != PushMode::update && part.codec != Codec::fp32)
    return {Code::refused, "values are assigned in fp32 only"};
  if (part.mode == PushMode::init_once && !spec.dense)
    return {Code::refused, "only a dense tensor is given a first value"};
  if (!std::isnan(part.lr) && (!std::isfinite(part.lr) || part.lr < 0.0f))
    return {Code::refused, "lr " + std::to_string(part.lr) + " is not a number >= 0"};
  if (part.dc_lambda != 0.0f && (!spec.dense || !std::isfinite(part.dc_lambda) || part.pulled.empty()))
    return {Code::refused, "delay compensation is for a dense tensor, by a finite lambda"};
  return {};
}

Status Shard::check(const PushPart& part, bool staged) {
  const Entry* entry = find(part.table);
  return entry == nullptr ? unknown(part.table) : check_part(entry->spec(), part, staged);
}

// Gives birth to what the part will touch: whatever can fail, fails before anything is stepped.
bool Shard::prepare(const PushPart& part) {
  Entry& entry = *find(part.table);
  if (auto* table = std::get_if<TableRows>(&entry.rows)) return table->prepare(part.keys, part.codec);
  auto& pieces = std::get<DensePieces>(entry.rows);
  const bool plain = part.codec == Codec::fp32 && part.dc_lambda == 0.0f;
  return std::all_of(part.keys.begin(), part.keys.end(),
                     [&](int64_t key) { return pieces.prepare(key, plain); });
}

// `last`: no other part of the same table was prepared since.
bool Shard::apply(const PushPart& part, uint64_t version, uint64_t step, bool last) {
  Entry& entry = *find(part.table);
  float lr = std::isnan(part.lr) ? entry.spec().optimizer.lr : part.lr;
  lr /= staleness_divisor(part.by_staleness, part.version_read, version);
  if (auto* table = std::get_if<TableRows>(&entry.rows)) {
    if (part.mode == PushMode::assign) return table->assign(part.keys, part.values.data(), version, step);
    if (!last) return table->push(part.keys, part.codec, part.values.data(), lr, version, step);
    table->push_prepared(part.keys.size(), part.codec, part.values.data(), lr, version, step);
    return true;
  }
  auto& pieces = std::get<DensePieces>(entry.rows);
  const std::byte* values = part.values.data();
  const std::byte* pulled = part.pulled.data();
  for (const int64_t key : part.keys) {
    const bool done = part.dc_lambda != 0.0f ? pieces.push_compensated(key, part.codec, values, pulled,
                                                                       part.dc_lambda, lr, version)
                      : part.mode == PushMode::update ? pieces.push(key, part.codec, values, lr, version)
                      : part.mode == PushMode::assign ? pieces.assign(key, values, version)
                                                      : pieces.init_once(key, values, version);
    if (!done) return false;
    values += encoded_bytes(part.codec, pieces.spec().floats(key));
    if (pulled != nullptr) pulled += size_t{4} * pieces.spec().floats(key);
  }
  return true;
}

// Whether the push is to be heard; otherwise `ack` says why not.
bool Shard::is_fresh(const PushIdentity& identity, Ack& ack) const {
  const Dedupe::Answer answer = dedupe_.check(identity);
  switch (answer.verdict) {
    case Dedupe::Verdict::duplicate:
      ack.duplicate = true;
      ack.version = answer.version != 0 ? answer.version : version_;
      return false;
    case Dedupe::Verdict::fenced:
      ack.status = {Code::fenced, "incarnation " + std::to_string(identity.incarnation) + " of client " +
                                      std::to_string(identity.client) +
                                      " is fenced: a newer one of the same name has connected"};
      return false;
    case Dedupe::Verdict::outside_window:
      ack.status = {Code::refused, "push " + std::to_string(identity.seq) + " of client " +
                                       std::to_string(identity.client) + " is outside the window of " +
                                       std::to_string(kOpenPushesMax) + " open pushes"};
      return false;
    case Dedupe::Verdict::fresh: break;
  }
  return true;
}

Status Shard::out_of_memory() const {
  return {Code::internal, "shard " + std::to_string(number_) + " is out of memory"};
}

Ack Shard::push(const PushIdentity* identity, std::span<const PushPart> parts, uint64_t step, uint64_t entry,
                bool more, const Settings& settings) {
  const std::lock_guard lock(mutex_);
  Ack ack = begin(parts.empty() ? 0 : parts[0].term, entry);
  if (!ack.status.ok() || ack.duplicate) return ack;
  if (identity != nullptr && entry == 0 && !is_fresh(*identity, ack)) return ack;
  for (const PushPart& part : parts)
    if (ack.status = check(part, false); !ack.status.ok()) return ack;
  if (ack.status = check(settings); !ack.status.ok()) return ack;
  if (identity != nullptr) dedupe_.make_room(*identity);
  ack.settings = entry == 0 ? changed(parts) : settings;
  adopt(ack.settings);  // rows are born with them
  bool whole = std::all_of(parts.begin(), parts.end(), [&](const PushPart& part) { return prepare(part); });
  const auto not_after = [](const PushPart& a, const PushPart& b) { return a.table >= b.table; };
  const bool each_once = std::adjacent_find(parts.begin(), parts.end(), not_after) == parts.end();
  const uint64_t version = more ? version_ : version_ + 1;
  for (const PushPart& part : parts) whole = whole && apply(part, version, step, each_once);
  if (!whole) {
    ack.status = out_of_memory();
    return ack;
  }
  if (!parts.empty() && parts[0].mode == PushMode::update && !more)
    staleness_.note(parts[0].version_read, version);
  made_with(ack.settings);
  ack.version = version_ = version;
  if (identity != nullptr) dedupe_.record(*identity, version_);
  for (const PushPart& part : parts) {
    Entry& pushed = *find(part.table);
    ++pushed.pushes;
    floats_moved_ += part.keys.size() * pushed.spec().floats(0);
    if (auto* table = std::get_if<TableRows>(&pushed.rows)) table->trim();
  }
  return logged(std::move(ack));
}

Ack Shard::stage(const PushIdentity* identity, std::span<const PushPart> parts, uint32_t rank, uint64_t step,
                 uint64_t entry) {
  const std::lock_guard lock(mutex_);
  Ack ack = begin(parts.empty() ? 0 : parts[0].term, entry);
  if (!ack.status.ok() || ack.duplicate) return ack;
  if (identity != nullptr && entry == 0 && !is_fresh(*identity, ack)) return ack;
  for (const PushPart& part : parts)
    if (ack.status = check(part, true); !ack.status.ok()) return ack;
  if (identity != nullptr) dedupe_.make_room(*identity);
  const auto spec = [&](uint32_t table) -> const TableSpec& { return find(table)->spec(); };
  ack.status = staging_.add(identity, rank, step, parts, spec, entry == 0);
  if (!ack.status.ok()) return ack;
  if (identity != nullptr) dedupe_.record(*identity, version_);
  return logged(std::move(ack));
}

// All that can fail was prepared, and each table is in one sum.
void Shard::apply(const Staging::Sum& sum, uint64_t step) {
  Entry& entry = *find(sum.table);
  const float lr = std::isnan(sum.lr) ? entry.spec().optimizer.lr : sum.lr;
  ++entry.pushes;
  floats_moved_ += sum.keys.size() * sum.stride;
  if (auto* table = std::get_if<TableRows>(&entry.rows)) {
    const auto* rows = reinterpret_cast<const std::byte*>(sum.rows);
    table->push_prepared(sum.keys.size(), Codec::fp32, rows, lr, version_, step);
    return;
  }
  auto& pieces = std::get<DensePieces>(entry.rows);
  for (size_t i = 0; i < sum.keys.size(); ++i) {
    const auto* row = reinterpret_cast<const std::byte*>(sum.rows + i * sum.stride);
    [[maybe_unused]] const bool pushed = pieces.push(sum.keys[i], Codec::fp32, row, lr, version_);
    assert(pushed);
  }
}

Ack Shard::commit(const Commit& commit, uint32_t term, uint64_t entry, const Settings& settings) {
  const std::lock_guard lock(mutex_);
  Ack ack = begin(entry == 0 ? place_.term : term, entry);
  ack.duplicate = ack.duplicate || commit.seq <= committed_;
  if (!ack.status.ok() || ack.duplicate) return ack;
  if (commit.seq != committed_ + 1 && !rejoined_) {
    ack.status = {Code::refused, "commit " + std::to_string(commit.seq) + " came to shard " +
                                     std::to_string(number_) + ", which is at " + std::to_string(committed_)};
    return ack;
  }
  if (ack.status = check(settings); !ack.status.ok()) return ack;
  std::vector<Staging::Sum>& sums = staging_.sums(commit, version_ + 1);
  ack.settings = entry == 0 ? changed(sums) : settings;
  adopt(ack.settings);
  for (const Staging::Sum& sum : sums) {
    if (!prepare({.table = sum.table, .keys = sum.keys})) {
      ack.status = out_of_memory();
      return ack;
    }
  }
  // A copy may be asked for it after its head is gone, by a worker that carries the same commit elsewhere.
  if (commit.clip > 0.0f) note_norm(commit, sums);
  made_with(ack.settings);
  if (!sums.empty()) ack.version = ++version_;
  const uint64_t step = commit.entries.empty() ? 0 : commit.entries.back().step;
  for (Staging::Sum& sum : sums) {
    const size_t floats = sum.keys.size() * sum.stride;
    for (size_t i = 0; i < floats && commit.scale != 1.0f; ++i) sum.rows[i] *= commit.scale;
    if (!std::isnan(commit.lr)) sum.lr = commit.lr;
    apply(sum, step);
  }
  staging_.finish(commit, version_, staleness_);
  committed_ = commit.seq;
  return logged(std::move(ack));
}

double Shard::norm(const Commit& commit) {
  const std::lock_guard lock(mutex_);
  if (!place_.head) return 0.0;
  if (commit.seq != normed_ && commit.seq <= committed_) return NAN;
  if (commit.seq != normed_) note_norm(commit, staging_.sums(commit, version_ + 1));
  return norm_;
}

void Shard::note_norm(const Commit& commit, std::span<const Staging::Sum> sums) {
  if (commit.seq == normed_) return;
  constexpr size_t kLanes = 16;  // a fixed tree: the same bits on every kind of CPU
  std::array<double, kLanes> lanes{};
  for (const Staging::Sum& sum : sums) {
    const size_t floats = sum.keys.size() * sum.stride;
    for (size_t i = 0; i < floats; ++i) lanes[i % kLanes] += double{sum.rows[i]} * double{sum.rows[i]};
  }
  for (size_t half = kLanes / 2; half > 0; half /= 2)
    for (size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  normed_ = commit.seq;
  norm_ = lanes[0];
}

Ack Shard::pull(const PullPart& part, const PullTarget& target) {
  const std::shared_lock lock(mutex_);
  Ack ack{.status = {}, .term = place_.term, .version = version_, .entry = entries_};
  Entry* entry = find(part.table);
  if (entry == nullptr) {
    ack.status = unknown(part.table);
    return ack;
  }
  if (ack.status = readable(part.term, part.any_copy); !ack.status.ok()) return ack;
  std::atomic_ref(entry->pulls).fetch_add(1, std::memory_order_relaxed);
  std::atomic_ref(floats_moved_)
      .fetch_add(part.keys.size() * entry->spec().floats(0), std::memory_order_relaxed);
  if (auto* table = std::get_if<TableRows>(&entry->rows)) {
    if (!table->pull(part.keys, target))
      ack.status = {Code::refused, "a position lies outside the buffer of the request"};
    return ack;
  }
  auto& pieces = std::get<DensePieces>(entry->rows);
  std::byte* out = target.out;
  for (size_t i = 0; i < part.keys.size(); ++i) {
    // Read once: the array may lie in memory that a peer can still write to.
    const int64_t key = *static_cast<const volatile int64_t*>(part.keys.data() + i);
    if (!pieces.spec().has_piece(key)) {
      ack.status = {Code::refused, describe(pieces.spec()) + " has no piece " + std::to_string(key)};
      return ack;
    }
    pieces.pull(key, target.codec,
                target.in_place ? target.out + size_t{4} * kPieceFloats * static_cast<size_t>(key) : out);
    out += encoded_bytes(target.codec, pieces.spec().floats(key));
  }
  return ack;
}

Staleness Shard::staleness() {
  const std::lock_guard lock(mutex_);
  return place_.head ? staleness_ : Staleness{};
}

Result<ScanPage> Shard::scan(uint32_t table, uint64_t cursor, size_t rows_max) {
  const std::lock_guard lock(mutex_);
  Entry* entry = find(table);
  if (entry == nullptr) return unknown(table);
  if (auto* rows = std::get_if<TableRows>(&entry->rows)) return rows->scan(cursor, rows_max);
  return Status{Code::refused, "a dense tensor has no rows to scan; pull it"};
}

Result<TableFigures> Shard::figures(uint32_t table) {
  const std::lock_guard lock(mutex_);
  const Entry* entry = find(table);
  if (entry == nullptr) return unknown(table);
  TableFigures figures;
  figures.pulls = entry->pulls;
  if (!place_.head) return figures;
  figures.pushes = entry->pushes;
  const TableSpec& spec = entry->spec();
  std::visit(
      [&](const auto& rows) {
        figures.rows = rows.size();
        figures.memory_bytes = rows.memory_bytes();
        figures.value_bytes = 4 * rows.value_floats();
      },
      entry->rows);
  // State goes with the value, but for a step counter or so per piece.
  const uint32_t floats = spec.floats(0);
  figures.state_bytes = figures.value_bytes * state_floats(spec.optimizer, floats) / floats;
  return figures;
}

ShardLoad Shard::load() {
  const std::lock_guard lock(mutex_);
  ShardLoad load{.bytes = 0, .floats = floats_moved_};
  for (const auto& [id, entry] : tables_)
    load.bytes += std::visit([](const auto& rows) { return rows.memory_bytes(); }, entry.rows);
  return load;
}

void Shard::fence(uint64_t client, uint32_t incarnation) {
  const std::lock_guard lock(mutex_);
  dedupe_.fence(client, incarnation);
}

void Shard::forget(uint64_t client, uint32_t incarnation) {
  const std::lock_guard lock(mutex_);
  dedupe_.forget(client, incarnation);
}

uint32_t Shard::incarnation(uint64_t client) {
  const std::shared_lock lock(mutex_);
  return dedupe_.incarnation(client);
}

}  // namespace shoal
