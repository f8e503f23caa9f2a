#include "store/sync_message.h"

namespace shoal {
namespace {

struct ReplyHead {
  uint64_t step;
  uint64_t closed;
  uint32_t dropped;
  uint32_t again;
  uint32_t numbers;
  uint32_t commits;
};
static_assert(sizeof(ReplyHead) == 32);

}  // namespace

std::vector<std::byte> encode_sync(const SyncRequest& request) {
  std::vector<std::byte> out;
  const SyncAsk& ask = request;
  const uint64_t units = request.units.size();
  pack(out, &ask, 1);
  pack(out, &units, 1);
  pack(out, request.units.data(), units);
  return out;
}

std::optional<SyncRequest> decode_sync(std::span<const std::byte> bytes) {
  SyncRequest request;
  uint64_t units = 0;
  if (!unpack<SyncAsk>(bytes, request) || !unpack(bytes, units) || !unpack(bytes, request.units, units))
    return std::nullopt;
  return request;
}

std::vector<std::byte> encode_sync_reply(const SyncReply& reply) {
  std::vector<std::byte> out;
  const ReplyHead head{reply.step,
                       reply.closed,
                       reply.dropped,
                       reply.again,
                       static_cast<uint32_t>(reply.numbers.size()),
                       static_cast<uint32_t>(reply.commits.size())};
  pack(out, &head, 1);
  pack(out, reply.numbers.data(), reply.numbers.size());
  for (const Commit& commit : reply.commits) encode_commit(commit, out);
  return out;
}

std::optional<SyncReply> decode_sync_reply(std::span<const std::byte> bytes) {
  ReplyHead head{};
  SyncReply reply;
  if (!unpack(bytes, head) || !unpack(bytes, reply.numbers, head.numbers)) return std::nullopt;
  reply.step = head.step;
  reply.closed = head.closed;
  reply.dropped = head.dropped != 0;
  reply.again = head.again != 0;
  for (uint32_t i = 0; i < head.commits; ++i)
    if (!decode_commit(bytes, reply.commits.emplace_back())) return std::nullopt;
  return reply;
}

}  // namespace shoal
