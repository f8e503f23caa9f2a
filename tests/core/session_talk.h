// What tests of sessions say and ask.
#pragma once

#include <cmath>
#include <cstring>
#include <string>

#include "serve/session.h"
#include "wire_talk.h"

namespace shoal::session_talk {

inline const std::string kToken = "the token of these tests";

struct Server {
  ServerState state{8, bytes_of(kToken), 0};
};

inline Part part_of(uint32_t table, uint32_t count, uint16_t shard = 0) {
  Part part;
  part.shard = shard;
  part.table = table;
  part.term = 1;
  part.count = count;
  part.lr = NAN;
  return part;
}

// Keys 0..count-1, then as many rows of ones.
inline Bytes keys_and_rows(size_t count, size_t row_bytes) {
  Bytes body(count * (8 + row_bytes));
  for (size_t i = 0; i < count; ++i) {
    const auto key = static_cast<int64_t>(i);
    std::memcpy(body.data() + 8 * i, &key, 8);
  }
  const float one = 1.0f;
  for (size_t at = 8 * count; at + 4 <= body.size(); at += 4) {
    std::memcpy(body.data() + at, &one, 4);
  }
  return body;
}

inline Code declare(Talk& talk, const TableSpec& spec) {
  return talk.ask(Kind::declare, {}, encode_table(spec)).code();
}

inline uint64_t rows_of(Talk& talk, uint32_t table) {
  const Part part = part_of(table, 0);
  const Reply reply = talk.ask(Kind::figures, {&part, 1});
  TableFigures figures;
  if (reply.body.size() < sizeof figures) {
    return UINT64_MAX;
  }
  std::memcpy(&figures, reply.body.data(), sizeof figures);
  return figures.rows;
}

}  // namespace shoal::session_talk
