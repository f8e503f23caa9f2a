// Arbitrary bytes, in arbitrary pieces, into FrameReader and Session: nothing may crash, hang, touch
// memory that is not its own or trip an assert, and a good client must be served afterwards.
//
// The input is read as a program of a few kinds of step: raw bytes; a frame built from fields (sealed, so
// that it passes the checksum and reaches the code behind it); a frame of the corpus with some of its
// bytes changed, sealed again or not. A conversation begins before the proof, or after it.
//
// Where there is a clang with libFuzzer, that makes the inputs (scripts/fuzz); else, and in the bounded run
// of the tests, fuzz_main.cc does.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "serve/chain.h"
#include "store/commit.h"
#include "store/sync_message.h"
#include "wire/pack.h"
#include "wire_talk.h"

using namespace shoal;

namespace {

constexpr uint32_t kShards = 4;
const std::string kToken = "fuzz";

// Takes values from the input; zeros when it is used up.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), left_(size) {}

  size_t left() const { return left_; }
  template <typename T>
  T take() {
    T value{};
    const size_t count = std::min(sizeof value, left_);
    if (count > 0) {
      std::memcpy(&value, data_, count);
    }
    data_ += count;
    left_ -= count;
    return value;
  }
  Bytes bytes(size_t count) {
    count = std::min(count, left_);
    const auto* from = reinterpret_cast<const std::byte*>(data_);
    Bytes taken(from, from + count);
    data_ += count;
    left_ -= count;
    return taken;
  }
  // Mostly small, sometimes at an edge of its type, sometimes anything.
  uint32_t number(uint32_t usual) {
    constexpr std::array<uint32_t, 6> edges{0, 1, 0x7fffffff, 0x80000000, 0xfffffffe, 0xffffffff};
    const auto how = take<uint8_t>();
    return how < 200 ? how % std::max(usual, 1u) : how < 240 ? edges[how % edges.size()] : take<uint32_t>();
  }

 private:
  const uint8_t* data_;
  size_t left_;
};

Part any_part(Input& input) {
  Part part;
  part.shard = static_cast<uint16_t>(input.number(kShards));
  part.codec = static_cast<uint8_t>(input.number(4));
  part.mode = static_cast<uint8_t>(input.number(3));
  part.table = input.number(6);
  part.term = 1 + input.number(1);
  part.count = input.number(8);
  part.lr = input.take<uint8_t>() < 200 ? NAN : input.take<float>();
  part.version = input.number(1000);
  part.keys_at = input.number(64) & (input.take<uint8_t>() < 250 ? ~1u : ~0u);
  part.values_at = input.number(256);
  part.positions_at = input.number(256);
  part.positions_end = input.number(16);
  part.keys_segment = static_cast<uint16_t>(input.number(3));
  part.values_segment = static_cast<uint16_t>(input.number(3));
  part.values_words = input.number(200);
  return part;
}

Kind any_kind(Input& input, bool from_server) {
  constexpr std::array clients{Kind::push, Kind::pull,    Kind::scan, Kind::push,   Kind::declare,
                               Kind::pull, Kind::segment, Kind::sync, Kind::commit, Kind::norm};
  constexpr std::array servers{
      Kind::replicate_push, Kind::replicate_commit, Kind::replicate_sync, Kind::image,
      Kind::image,          Kind::commit,           Kind::pull,           Kind::declare};
  const auto how = input.take<uint8_t>();
  if (how >= 252) return static_cast<Kind>(input.take<uint8_t>() % 40);
  return from_server ? servers[how % servers.size()] : clients[how % clients.size()];
}

void change_some(Input& input, Bytes& body) {
  for (uint8_t changes = input.take<uint8_t>() % 4; changes > 1 && !body.empty(); --changes)
    body[input.take<uint16_t>() % body.size()] = input.take<std::byte>();
}

// What a round ends with, of pushes that this client may have staged.
Bytes any_commit(Input& input, uint64_t client) {
  Commit commit{.seq = 1 + input.number(3), .clip = input.take<uint8_t>() % 4 == 0 ? 1.0f : 0.0f};
  commit.entries.resize(input.number(3) % 16);
  for (CommitEntry& entry : commit.entries) {
    entry = {.client = client, .step = input.number(3), .incarnation = 1, .rank = input.number(3)};
    entry.weight = input.take<uint8_t>() % 8 == 0 ? kDropped : 1.0f;
  }
  Bytes body;
  encode_commit(commit, body);
  change_some(input, body);
  return body;
}

Bytes any_question(Input& input) {
  SyncRequest question;
  question.verb = static_cast<SyncVerb>(input.number(12));
  question.rank = input.number(3);
  question.step = input.number(3);
  question.epoch = input.number(2);
  question.count = input.number(9);
  question.number = input.number(300);
  question.weight = static_cast<float>(input.number(3));
  question.config = {.workers = 1 + input.number(3), .take = static_cast<Take>(input.number(3))};
  question.units.resize(input.number(3) % 16);
  Bytes body = encode_sync(question);
  change_some(input, body);
  return body;
}

// A table's description, sound or with some bytes changed.
Bytes any_table(Input& input) {
  TableSpec spec = make_table(1 + input.number(5), 1 + input.number(9), input.take<uint8_t>() % 3 == 0);
  spec.optimizer.kind = static_cast<OptimizerKind>(1 + input.number(6));
  spec.optimizer.beta1 = spec.optimizer.beta2 = 0.5;
  spec.optimizer.eps = 1e-8f;
  spec.generation = input.number(3);
  if (spec.dense && input.take<uint8_t>() % 4 == 0) {
    spec.dim = kPieceFloats + input.number(70'000);
  }
  Bytes body = encode_table(spec);
  change_some(input, body);
  return body;
}

// Of tables, as they travel down a chain.
Bytes any_settings(Input& input) {
  Bytes body;
  const uint32_t count = input.number(2) % 3;
  pack(body, &count, 1);
  for (uint32_t i = 0; i < count; ++i) {
    const Bytes table = any_table(input);
    const auto size = static_cast<uint32_t>(table.size());
    pack(body, &size, 1);
    pack(body, table.data(), table.size());
  }
  return body;
}

// The head of a shard's image with pushes that wait for their round; of the right size for their table,
// mostly.
Bytes any_head(Input& input, uint64_t client) {
  Bytes body = any_settings(input);
  const std::array<uint64_t, 8> numbers{0, 1 + input.number(3), input.number(2), 0, 0, 0, 0, 0};
  const std::array<uint64_t, 2> records_and_contributions{0, input.number(3) % 4};
  pack(body, numbers.data(), numbers.size());
  pack(body, records_and_contributions.data(), 2);
  for (uint64_t i = 0; i < records_and_contributions[1]; ++i) {
    const uint64_t parts = input.number(3) % 4;
    const std::array<uint64_t, 5> head{input.number(3), i, client, 1, parts};
    pack(body, head.data(), head.size());
    for (uint64_t n = 0; n < parts; ++n) {
      const uint32_t table = 1 + input.number(5);
      const uint32_t stride = input.take<uint8_t>() % 4 == 0 ? input.number(20) % 1000 : 3 * (table % 8);
      const std::array<uint32_t, 2> about{table, stride};
      const float lr = NAN;
      const std::array<uint64_t, 3> sizes{0, 0, input.number(4) % 8};
      pack(body, about.data(), 2);
      pack(body, &lr, 1);
      pack(body, sizes.data(), 3);
      const std::vector<int64_t> keys(sizes[2], input.number(9));
      const std::vector<float> rows(sizes[2] * stride, 1.0f);
      pack(body, keys.data(), keys.size());
      pack(body, rows.data(), rows.size());
    }
  }
  change_some(input, body);
  return body;
}

// A descriptor that a client may send: mostly a sealed segment.
int any_descriptor(Input& input) {
  if (input.take<uint8_t>() % 32 == 0) {
    return open("/dev/null", O_RDWR | O_CLOEXEC);
  }
  const auto segment = Segment::create(1, 64 + input.number(4096) % 100'000);
  return segment.ok() ? dup((*segment)->fd()) : -1;
}

Bytes any_body(Input& input, Kind kind, std::vector<Part>& parts, uint64_t client) {
  const bool raw = input.take<uint8_t>() % 8 == 0;
  if (kind == Kind::declare) return any_table(input);
  if (!raw && (kind == Kind::commit || kind == Kind::norm || kind == Kind::replicate_commit))
    return any_commit(input, client);
  if (!raw && (kind == Kind::sync || kind == Kind::replicate_sync)) return any_question(input);
  if (!raw && kind == Kind::image) {
    parts.resize(1);
    parts[0].table = 0;
    parts[0].mode = 0;
    return any_head(input, client);
  }
  return input.bytes(input.number(250) % 4096);
}

// To a push or a commit between servers.
void add_settings(Input& input, Header& header, std::vector<Part>& parts, Bytes& body) {
  const bool commits = header.kind == static_cast<uint16_t>(Kind::replicate_commit);
  if (!commits && (header.kind != static_cast<uint16_t>(Kind::replicate_push) || parts.empty())) return;
  body.resize(commits ? body.size() : (body.size() + 3) / 4 * 4);
  Part settings = parts.empty() ? Part{} : parts[0];
  settings.mode = 3;
  settings.values_segment = 0;
  settings.values_at = static_cast<uint32_t>(body.size() / 4);
  const Bytes bytes = any_settings(input);
  settings.values_words = static_cast<uint32_t>((bytes.size() + 3) / 4);
  body.insert(body.end(), bytes.begin(), bytes.end());
  header.flags = commits ? uint32_t{kSettings} : uint32_t{kApply};
  if (commits) return;
  body.resize((body.size() + 3) / 4 * 4);
  parts.insert(parts.begin(), settings);
}

Bytes any_frame(Input& input, Talk& talk, uint64_t& seq) {
  const Kind kind = any_kind(input, talk.client >= kServerClients);
  if (kind == Kind::segment && input.take<uint8_t>() % 16 != 0) {
    talk.descriptors.push_back(any_descriptor(input));
  }
  Header header;
  header.kind = static_cast<uint16_t>(kind);
  header.client = talk.client + (input.take<uint8_t>() < 252 ? 0 : 1);
  header.incarnation = talk.incarnation;
  header.request = kind == Kind::segment ? 1 + input.number(3) : input.take<uint16_t>();
  header.seq = input.take<uint8_t>() < 200 ? ++seq : input.number(300);
  header.low = input.take<uint8_t>() < 200 ? header.seq : input.number(300);
  std::vector<Part> parts(input.number(4) % 64);
  std::generate(parts.begin(), parts.end(), [&input] { return any_part(input); });
  header.flags = input.take<uint8_t>() % 2 == 0 ? uint32_t{kStage} : uint32_t{kApply};
  header.rank = input.number(3);
  header.step = input.number(3);
  Bytes body = any_body(input, kind, parts, talk.client);
  if (input.take<uint8_t>() % 4 == 0) add_settings(input, header, parts, body);
  return make_frame(header, parts, body);
}

// Bytes changed anywhere; then, mostly, the checksum made right again.
void damage(Input& input, Bytes& frame) {
  for (uint8_t changes = input.take<uint8_t>() % 8; changes > 0; --changes) {
    frame[input.take<uint16_t>() % frame.size()] = input.take<std::byte>();
  }
  Header header;
  if (frame.size() < sizeof header || input.take<uint8_t>() % 4 == 0) {
    return;
  }
  std::memcpy(&header, frame.data(), sizeof header);
  header.magic = kMagic;
  header.version = kWireVersion;
  const size_t parts_max = (frame.size() - sizeof header) / sizeof(Part);
  std::vector<Part> parts(std::min<size_t>(header.part_count, parts_max));
  if (!parts.empty()) {
    std::memcpy(parts.data(), frame.data() + sizeof header, parts.size() * sizeof(Part));
  }
  const size_t body = frame.size() - sizeof header - parts.size() * sizeof(Part);
  seal_head(header, parts, input.take<uint8_t>() % 8 == 0 ? input.take<uint32_t>() : body, frame.data());
}

void converse(Input& input, Talk& talk) {
  uint64_t seq = 0;
  while (input.left() > 0 && talk.open()) {
    const auto step = input.take<uint8_t>();
    const size_t chunk = step % 3 == 0 ? 1 + input.take<uint8_t>() : SIZE_MAX;
    Bytes bytes = step < 20 ? input.bytes(input.take<uint16_t>()) : any_frame(input, talk, seq);
    if (step >= 200 && !bytes.empty()) {
      damage(input, bytes);
    }
    if (step % 7 == 0) {
      talk.sink.room_replies = talk.sink.replies.size();
    }
    talk.feed(bytes, chunk);
    talk.sink.replies.clear();
  }
}

void require(bool held, const char* what) {
  if (!held) {
    std::fprintf(stderr, "fuzz: %s\n", what);
    std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  ServerState server(kShards, bytes_of(kToken), 0);
  const auto begin = input.take<uint8_t>();
  {
    Talk talk(server);
    if (begin % 8 >= 6) talk.client = kServerClients + 5;
    if (begin % 8 != 0) {
      require(talk.greet(kToken), "a good greeting was refused");
      for (uint32_t id = 1; id < 6 && begin % 8 != 1; ++id) {
        talk.ask(Kind::declare, {},
                 encode_table(make_table(id, id == 3 ? 70'001 : 3 * id, id == 3 || id == 5)));
      }
      for (int fd = 0; fd < 2 && begin % 8 > 3; ++fd) {
        talk.descriptors.push_back(any_descriptor(input));
        talk.ask(Kind::segment);
      }
    }
    converse(input, talk);
    require(begin % 8 != 0 || !talk.proved(), "somebody got in without the token");
  }
  Talk good(server);
  good.client = 99;
  require(good.greet(kToken), "a good client is not welcome any more");
  require(good.ask(Kind::declare, {}, encode_table(make_table(77, 2))).code() == Code::ok, "nor served");
  return 0;
}
