// A server's side of a connection against clients that no client of ours would be.
#include "serve/session.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <atomic>
#include <cmath>
#include <thread>

#include "check.h"
#include "session_talk.h"

using namespace shoal;
using namespace shoal::session_talk;

namespace {

// A push of keys 0 and 1 of table 1 (dim 4), changed by `change`; gives the answer's code.
template <typename Change>
Code push_changed(Talk& talk, Change change) {
  Part part = part_of(1, 2);
  part.values_at = 4;
  change(part);
  return talk.ask(Kind::push, {&part, 1}, keys_and_rows(2, 16), 1, 1).code();
}

// A sealed memfd as a client makes them.
int segment_of(size_t bytes) {
  const auto segment = Segment::create(1, bytes);
  return segment.ok() ? dup((*segment)->fd()) : -1;
}

}  // namespace

TEST(a_proved_client_is_served) {
  Server server;
  Talk talk(server.state);
  CHECK(talk.greet(kToken));
  CHECK(declare(talk, make_table(1, 4)) == Code::ok);
  CHECK(push_changed(talk, [](Part&) {}) == Code::ok);
  CHECK_EQ(rows_of(talk, 1), 2);
}

TEST(a_wrong_token_is_refused) {
  Server server;
  Talk talk(server.state);
  CHECK(!talk.greet("another token"));
  CHECK(!talk.open());
  CHECK(talk.sink.replies.back().kind() == Kind::refuse);
  CHECK_EQ(server.state.counters.refused.load(), 1);
  CHECK_EQ(server.state.counters.connections.load(), 0);
}

TEST(a_proof_made_for_another_identity_is_refused) {
  Server server;
  Talk talk(server.state);
  const Reply challenge = talk.hello();
  Digest theirs;
  std::memcpy(theirs.data(), challenge.body.data(), sizeof theirs);
  const Digest proof = client_proof(bytes_of(kToken), Digest{}, theirs, talk.client + 1, talk.incarnation);
  CHECK(talk.ask(Kind::proof, {}, proof).kind() == Kind::refuse);
  CHECK(!talk.open());
}

TEST(a_proof_cannot_be_used_again) {
  Server server;
  Talk first(server.state);
  const Reply challenge = first.hello();
  Digest theirs;
  std::memcpy(theirs.data(), challenge.body.data(), sizeof theirs);
  const Digest proof = client_proof(bytes_of(kToken), Digest{}, theirs, first.client, first.incarnation);
  CHECK(first.ask(Kind::proof, {}, proof).kind() == Kind::welcome);
  Talk second(server.state);
  second.hello();
  CHECK(second.ask(Kind::proof, {}, proof).kind() == Kind::refuse);
}

TEST(nothing_is_served_before_the_proof) {
  for (const Kind kind : {Kind::push, Kind::pull, Kind::declare, Kind::scan, Kind::figures, Kind::segment,
                          Kind::proof, Kind::welcome, Kind::reply}) {
    Server server;
    Talk at_once(server.state);
    CHECK(at_once.ask(kind, {}, Bytes(64)).kind() == Kind::refuse);
    CHECK(!at_once.open());
    Talk after_hello(server.state);
    after_hello.hello();
    CHECK(after_hello.ask(kind, {}, Bytes(64)).kind() == Kind::refuse);
    CHECK(!after_hello.open() && !after_hello.proved());
  }
}

TEST(a_short_greeting_is_refused) {
  Server server;
  Talk talk(server.state);
  CHECK(talk.ask(Kind::hello, {}, Bytes(31)).kind() == Kind::refuse);
  Talk other(server.state);
  other.hello();
  CHECK(other.ask(Kind::proof, {}, Bytes(31)).kind() == Kind::refuse);
}

TEST(unknown_kinds_end_the_connection_only) {
  Server server;
  Talk good(server.state);
  CHECK(good.greet(kToken));
  for (const int kind : {0, 1, 3, 5, 6, 11, 25, 32, 33, 0xffff}) {
    Talk talk(server.state);
    talk.client = 100 + static_cast<uint64_t>(kind);
    CHECK(talk.greet(kToken));
    CHECK(talk.ask(static_cast<Kind>(kind)).kind() == Kind::refuse);
    CHECK(!talk.open());
  }
  CHECK(declare(good, make_table(1, 4)) == Code::ok);
}

TEST(a_frame_for_another_client_is_refused) {
  Server server;
  Talk talk(server.state);
  CHECK(talk.greet(kToken));
  talk.client = 8;
  CHECK(talk.ask(Kind::figures).kind() == Kind::refuse);
  CHECK(!talk.open());
}

TEST(a_newer_connection_of_a_client_ends_the_older) {
  Server server;
  Talk older(server.state);
  Talk newer(server.state);
  CHECK(older.greet(kToken));
  CHECK(newer.greet(kToken));
  older.ask(Kind::figures);
  CHECK(!older.open());
  CHECK(declare(newer, make_table(1, 4)) == Code::ok);
}

TEST(an_older_incarnation_is_fenced) {
  Server server;
  Talk newer(server.state);
  newer.incarnation = 2;
  CHECK(newer.greet(kToken));
  Talk older(server.state);
  CHECK(older.prove(bytes_of(kToken), older.hello()).code() == Code::fenced);
  CHECK(!older.open());
}

TEST(a_push_that_names_what_is_not_there_changes_nothing) {
  Server server;
  Talk talk(server.state);
  CHECK(talk.greet(kToken));
  CHECK(declare(talk, make_table(1, 4)) == Code::ok);
  CHECK(push_changed(talk, [](Part& part) { part.shard = 8; }) == Code::refused);
  CHECK(push_changed(talk, [](Part& part) { part.codec = 4; }) == Code::refused);
  CHECK(push_changed(talk, [](Part& part) { part.mode = 3; }) == Code::refused);
  CHECK(push_changed(talk, [](Part& part) { part.mode = 2; }) == Code::refused);
  CHECK(push_changed(talk, [](Part& part) { part.keys_at = 1; }) == Code::refused);
  CHECK(push_changed(talk, [](Part& part) { part.count = 3; }) == Code::refused);
  CHECK(push_changed(talk, [](Part& part) { part.count = UINT32_MAX; }) == Code::refused);
  CHECK(push_changed(talk, [](Part& part) { part.values_at = 5; }) == Code::refused);
  CHECK(push_changed(talk, [](Part& part) { part.values_at = UINT32_MAX; }) == Code::refused);
  CHECK(push_changed(talk, [](Part& part) { part.table = 9; }) == Code::unknown_table);
  CHECK(push_changed(talk, [](Part& part) { part.term = 2; }) == Code::moved);
  CHECK(push_changed(talk, [](Part& part) { part.lr = -1.0f; }) == Code::refused);
  CHECK(push_changed(talk, [](Part& part) { part.lr = INFINITY; }) == Code::refused);
  CHECK(push_changed(talk, [](Part& part) { part.keys_segment = 3; }) == Code::refused);
  CHECK(push_changed(talk, [](Part& part) { part.values_segment = 3; }) == Code::refused);
  CHECK(talk.open());
  CHECK_EQ(rows_of(talk, 1), 0);
}

TEST(a_push_sent_twice_is_applied_once) {
  Server server;
  Talk talk(server.state);
  CHECK(talk.greet(kToken));
  CHECK(declare(talk, make_table(1, 4)) == Code::ok);
  CHECK(push_changed(talk, [](Part&) {}) == Code::ok);
  CHECK(push_changed(talk, [](Part&) {}) == Code::ok);
  CHECK_EQ(talk.sink.replies.back().parts[0].mode, 1);
  CHECK_EQ(server.state.counters.duplicates.load(), 1);
  const Part part = part_of(1, 1);
  const Reply reply = talk.ask(Kind::pull, {&part, 1}, keys_and_rows(1, 0));
  float value = 0.0f;
  std::memcpy(&value, reply.body.data(), sizeof value);
  CHECK_EQ(value, -1.0f);
}

TEST(a_push_outside_the_window_is_refused) {
  Server server;
  Talk talk(server.state);
  CHECK(talk.greet(kToken));
  CHECK(declare(talk, make_table(1, 4)) == Code::ok);
  Part part = part_of(1, 2);
  part.values_at = 4;
  CHECK(talk.ask(Kind::push, {&part, 1}, keys_and_rows(2, 16), 257, 1).code() == Code::refused);
  CHECK_EQ(rows_of(talk, 1), 0);
}

TEST(a_pull_that_names_what_is_not_there_is_refused) {
  Server server;
  Talk talk(server.state);
  CHECK(talk.greet(kToken));
  CHECK(declare(talk, make_table(1, 4)) == Code::ok);
  CHECK(declare(talk, make_table(2, 100, true)) == Code::ok);
  const auto pull = [&talk](auto change) {
    Part part = part_of(1, 2);
    change(part);
    return talk.ask(Kind::pull, {&part, 1}, keys_and_rows(2, 0)).code();
  };
  CHECK(pull([](Part&) {}) == Code::ok);
  CHECK(pull([](Part& part) { part.shard = 8; }) == Code::refused);
  CHECK(pull([](Part& part) { part.codec = 9; }) == Code::refused);
  CHECK(pull([](Part& part) { part.count = 3; }) == Code::refused);
  CHECK(pull([](Part& part) { part.keys_at = UINT32_MAX - 1; }) == Code::refused);
  CHECK(pull([](Part& part) { part.table = 77; }) == Code::unknown_table);
  CHECK(pull([](Part& part) { part.table = 2; }) == Code::refused);  // piece 1 of a tensor of one
  CHECK(pull([](Part& part) { part.values_segment = 5; }) == Code::refused);
  CHECK(talk.open());
}

TEST(a_long_pull_waits_for_its_reader_and_comes_whole) {
  for (const Codec codec : {Codec::fp32, Codec::fp16, Codec::int8}) {
    Server server;
    Talk talk(server.state);
    CHECK(talk.greet(kToken));
    CHECK(declare(talk, make_table(1, 1033)) == Code::ok);
    std::vector<Part> parts{part_of(1, 5001, 0), part_of(1, 3, 1), part_of(1, 4999, 2)};
    for (Part& part : parts) part.codec = static_cast<uint8_t>(codec);
    parts[1].samples = 5001;
    parts[2].samples = 5004;
    talk.sink.room_replies = 1;
    talk.ask(Kind::pull, parts, keys_and_rows(5001, 0));
    uint32_t rows = 0;
    for (const Reply& reply : talk.sink.replies) {
      size_t end = 0;  // of the part before
      for (const Part& part : reply.parts) {
        CHECK_EQ(part.keys_at, rows);
        CHECK(size_t{4} * part.values_at >= end);
        end = size_t{4} * part.values_at + part.count * encoded_bytes(codec, 1033);
        CHECK(array_in(reply.body, part.values_at, part.count * encoded_bytes(codec, 1033)).has_value());
        rows += part.count;
      }
      CHECK_EQ(reply.header.last, &reply == &talk.sink.replies.back() ? 1 : 0);
    }
    CHECK_EQ(rows, 10'003);
    CHECK(talk.sink.replies.size() > 1);
  }
}

TEST(a_segment_needs_its_descriptor_and_its_seals) {
  Server server;
  Talk without(server.state);
  CHECK(without.greet(kToken));
  CHECK(without.ask(Kind::segment).kind() == Kind::refuse);
  Talk unsealed(server.state);
  CHECK(unsealed.greet(kToken));
  unsealed.descriptors.push_back(memfd_create("test", MFD_CLOEXEC));
  CHECK(unsealed.ask(Kind::segment).kind() == Kind::refuse);
  Talk no_memory(server.state);
  CHECK(no_memory.greet(kToken));
  no_memory.descriptors.push_back(open("/dev/null", O_RDONLY | O_CLOEXEC));
  CHECK(no_memory.ask(Kind::segment).kind() == Kind::refuse);
}

TEST(arrays_in_a_segment_must_lie_in_it) {
  Server server;
  Talk talk(server.state);
  CHECK(talk.greet(kToken));
  CHECK(declare(talk, make_table(1, 4)) == Code::ok);
  talk.descriptors.push_back(segment_of(4096));
  talk.ask(Kind::segment);  // its id is the number of the request
  CHECK(talk.open());
  const auto pull = [&talk](auto change) {
    Part part = part_of(1, 4);
    part.keys_segment = part.values_segment = 4;
    part.positions_at = 16;
    part.positions_end = 4;
    part.values_at = 64;
    change(part);
    return talk.ask(Kind::pull, {&part, 1}).code();
  };
  CHECK(pull([](Part&) {}) == Code::ok);
  CHECK(pull([](Part& part) { part.values_at = 1024 - 15; }) == Code::refused);
  CHECK(pull([](Part& part) { part.values_at = 1024 - 16; }) == Code::ok);
  CHECK(pull([](Part& part) { part.positions_end = 10'000; }) == Code::refused);
  CHECK(pull([](Part& part) { part.positions_end = 0; }) == Code::refused);  // position 0 is not below 0
  CHECK(pull([](Part& part) { part.positions_at = 1022; }) == Code::refused);
  CHECK(pull([](Part& part) { part.keys_at = 1020; }) == Code::refused);
  CHECK(pull([](Part& part) { part.count = 1000; }) == Code::refused);
  CHECK(pull([](Part& part) { part.codec = 1; }) == Code::refused);
  CHECK(pull([](Part& part) { part.values_segment = 5; }) == Code::refused);
  CHECK(talk.open());
}

TEST(a_table_cannot_be_opened_with_other_settings) {
  Server server;
  Talk talk(server.state);
  CHECK(talk.greet(kToken));
  CHECK(declare(talk, make_table(1, 4)) == Code::ok);
  CHECK(declare(talk, make_table(1, 4)) == Code::ok);
  CHECK(declare(talk, make_table(1, 5)) == Code::mismatch);
  CHECK(declare(talk, make_table(2, 4097)) == Code::bad_input);
  CHECK(declare(talk, make_table(0, 4)) == Code::bad_input);
  Bytes cut = encode_table(make_table(3, 4));
  cut.pop_back();
  CHECK(talk.ask(Kind::declare, {}, cut).code() == Code::refused);
  CHECK(talk.ask(Kind::declare, {}, {}).code() == Code::refused);
}

TEST(a_scan_names_a_shard_and_a_table) {
  Server server;
  Talk talk(server.state);
  CHECK(talk.greet(kToken));
  CHECK(declare(talk, make_table(1, 4)) == Code::ok);
  CHECK(declare(talk, make_table(2, 100, true)) == Code::ok);
  const auto scan = [&talk](uint32_t table, uint16_t shard, uint64_t cursor) {
    Part part = part_of(table, UINT32_MAX, shard);
    part.version = cursor;
    return talk.ask(Kind::scan, {&part, 1}).code();
  };
  CHECK(scan(1, 0, 0) == Code::ok);
  CHECK(scan(1, 0, UINT64_MAX) == Code::ok);
  CHECK(scan(1, 8, 0) == Code::refused);
  CHECK(scan(2, 0, 0) == Code::refused);
  CHECK(scan(3, 0, 0) == Code::unknown_table);
  CHECK(talk.ask(Kind::scan).code() == Code::refused);
  CHECK(talk.open());
}

TEST(a_goodbye_drops_a_clients_records_and_a_cut_does_not) {
  Server server;
  const auto push_once = [&server](bool goodbye) {
    Talk talk(server.state);
    CHECK(talk.greet(kToken));
    CHECK(declare(talk, make_table(1, 4)) == Code::ok);
    Part part = part_of(1, 2);
    part.values_at = 4;
    const Reply reply = talk.ask(Kind::push, {&part, 1}, keys_and_rows(2, 16), 1, 1);
    CHECK(reply.code() == Code::ok && reply.parts.size() == 1);
    if (goodbye) {
      talk.ask(Kind::goodbye);
      CHECK(talk.sink.replies.empty() && !talk.open());
    }
    return reply.parts.at(0).mode == 1;  // it was a duplicate
  };
  CHECK(!push_once(false));  // its connection is then cut: the client may come again and ask
  CHECK(push_once(true));
  CHECK(!push_once(false));  // nothing is known of the client that said goodbye
}

TEST(after_a_goodbye_no_other_connection_of_the_client_is_heard) {
  Server server;
  Talk first(server.state);
  CHECK(first.greet(kToken));
  Talk second(server.state);
  CHECK(second.greet(kToken));
  second.ask(Kind::goodbye);
  first.ask(Kind::figures);
  CHECK(first.sink.replies.empty() && !first.open());
}

TEST(a_request_with_another_term_is_refused) {
  Server server;
  Talk talk(server.state);
  CHECK(talk.greet(kToken));
  CHECK(declare(talk, make_table(1, 1)) == Code::ok);
  talk.descriptors.push_back(segment_of(4096));
  talk.ask(Kind::segment);  // its id is the number of the request
  for (const uint32_t term : {0u, 2u, UINT32_MAX}) {
    for (const Kind kind : {Kind::push, Kind::pull}) {
      Part part = part_of(1, 1);
      part.term = term;
      part.values_at = 2;
      const Reply reply = talk.ask(kind, {&part, 1}, keys_and_rows(1, 4), term + 1, 1);
      CHECK(reply.code() == Code::moved);
      CHECK(reply.text().find("is at term 1; the request names term") != std::string::npos);
    }
    Part shared = part_of(1, 1);
    shared.term = term;
    shared.keys_segment = shared.values_segment = 4;
    shared.positions_at = 16;
    shared.positions_end = 1;
    shared.values_at = 64;
    CHECK(talk.ask(Kind::pull, {&shared, 1}).code() == Code::moved);
  }
  CHECK_EQ(rows_of(talk, 1), 0);
}

TEST(a_segment_that_is_gone_is_unmapped) {
  Server server;
  Talk talk(server.state);
  CHECK(talk.greet(kToken));
  CHECK(declare(talk, make_table(1, 4)) == Code::ok);
  talk.descriptors.push_back(segment_of(4096));
  talk.ask(Kind::segment);
  Part part = part_of(1, 1);
  part.keys_segment = part.values_segment = 4;
  part.positions_end = 1;
  part.values_at = 64;
  CHECK(talk.ask(Kind::pull, {&part, 1}).code() == Code::ok);
  Header gone;
  gone.kind = static_cast<uint16_t>(Kind::segment_gone);
  gone.client = talk.client;
  gone.incarnation = talk.incarnation;
  for (const uint64_t id : {uint64_t{4}, uint64_t{4}, UINT64_MAX}) {  // twice, or never known: harmless
    gone.request = id;
    talk.feed(make_frame(gone));
  }
  CHECK(talk.ask(Kind::pull, {&part, 1}).code() == Code::refused);
  CHECK(talk.open());
}

TEST(a_commit_that_meets_a_new_placement_is_still_sent_to_the_servers_behind) {
  Server server;
  server.state.chain.introduce(0, 1, 2);
  const std::vector<ChainPlace> places(8, {.term = 1, .head = true, .reads = false, .next = 1});
  constexpr uint32_t kPlacement = 5;
  server.state.place(kPlacement, places);
  std::atomic<bool> over{false};
  // The same placement again and again: while it is being made known, whoever asks is asked to come again.
  std::thread placing([&] {
    while (!over) server.state.place(kPlacement, places);
  });
  Talk talk(server.state);
  CHECK(talk.greet(kToken));
  talk.member_term = kPlacement;
  constexpr uint64_t kCommits = 2000;
  for (uint64_t seq = 1; seq <= kCommits; ++seq) {
    Bytes body;
    encode_commit({.seq = seq}, body);
    while (talk.ask(Kind::commit, {}, body).code() == Code::moved) {
    }
  }
  over = true;
  placing.join();
  std::vector<uint64_t> entries(8, 0);
  while (const std::shared_ptr<Request> request = server.state.chain.next_to_send(1)) {
    for (const Part& part : request->parts) CHECK(log_entry(part) == ++entries[part.shard]);
  }
  CHECK(entries == std::vector<uint64_t>(8, kCommits));
}
