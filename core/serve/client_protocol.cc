#include "serve/client_protocol.h"

#include <algorithm>

#include "base/mutants.h"

namespace shoal {
namespace {

bool is(const Request& request, Kind kind) { return request.header.kind == static_cast<uint16_t>(kind); }

}  // namespace

ClientProtocol::ClientProtocol(uint64_t client, uint32_t incarnation, RequestBuilder& builder)
    : builder_(builder),
      machine_(client, incarnation, builder.placement()->servers.size()),
      acknowledged_(builder.shards()) {
  learn_names(*builder.placement());
}

// A server that is gone has no address in later placements.
void ClientProtocol::learn_names(const Placement& placement) {
  while (names_.size() < placement.servers.size()) names_.push_back(placement.servers[names_.size()].name());
}

void ClientProtocol::set_shares_memory(uint32_t server) {
  shares_memory_.resize(std::max<size_t>(shares_memory_.size(), server + 1));
  shares_memory_[server] = true;
}

bool ClientProtocol::reaches(const Request& request) const {
  return !RequestBuilder::needs_shared_memory(request) ||
         (request.server < shares_memory_.size() && shares_memory_[request.server]);
}

// It may have been made for a server that reaches our memory, and be for another one now.
std::vector<std::shared_ptr<Request>> ClientProtocol::route(const std::shared_ptr<Request>& request) {
  auto routed = builder_.route(request);
  for (auto& one : routed)
    if (is(*one, Kind::push) && !reaches(*one)) one = RequestBuilder::in_body(*one);
  return routed;
}

std::vector<uint32_t> ClientProtocol::submit(std::shared_ptr<Request> request) {
  std::vector<uint32_t> servers;
  // What is on its way to a server that is gone is found here: the placement changes only between calls.
  for (auto& one : route(request)) {
    servers.push_back(one->server);
    machine_.add(one);
    if (!reaches(*one))
      move_open(*one, strays_);
    else if (!builder_.placement()->is_up(one->server))
      refused(*one, gone(one->server));
  }
  return servers;
}

// In the server's words.
Status ClientProtocol::said(uint32_t server, const FrameView& answer) const {
  const std::string all(reinterpret_cast<const char*>(answer.body.data()), answer.body.size());
  return {static_cast<Code>(answer.header.code), names_[server] + ": " + all.substr(0, all.find('\0'))};
}

std::shared_ptr<Request> ClientProtocol::heard(uint32_t server, const FrameView& answer) {
  std::shared_ptr<Request> request = machine_.find(server, answer.header.request);
  if (request == nullptr) return nullptr;
  const auto code = static_cast<Code>(answer.header.code);
  // An answer that lets a worker go on which has yet to learn the placement by which others went on: it is
  // asked again, until this client knows that one.
  const bool too_new = is(*request, Kind::sync) && answer.header.member_term > builder_.placement()->version;
  if (code == Code::moved || too_new) {
    refused(*request, {Code::moved, said(server, answer).message()});
    return nullptr;
  }
  if (code != Code::ok) {
    machine_.answered(server, answer.header.request, said(server, answer));
    return nullptr;
  }
  if (is(*request, Kind::pull)) {
    for (const Part& part : answer.parts) builder_.note_version(part.shard, part.version);
    if (!too_old(answer)) acknowledged_.seen(answer.parts);
  }
  return request;
}

bool ClientProtocol::taken(const Request& request, const FrameView& answer, Status status) {
  if (status.ok() && answer.header.last == 0) return false;
  const uint64_t number = answer.header.request;
  // Not one that a new placement has just taken back.
  if (status.ok() && is(request, Kind::push) && machine_.find(request.server, number) != nullptr) {
    // What is lost with a term that is over may have been counted already, so it is asked again: whoever has
    // the push says so, and whoever has not takes it.
    if (too_old(answer) && !SHOAL_MUTANT(late_ack)) {
      refused(request, {Code::moved, "of an earlier term"});
      return true;
    }
    acknowledged_.note(answer.parts, (request.header.flags & kStage) != 0);
  }
  machine_.answered(request.server, number, std::move(status));
  return true;
}

// Whether it was given in a term that this client knows to be over.
bool ClientProtocol::too_old(const FrameView& answer) const {
  const auto known = builder_.placement();
  return std::any_of(answer.parts.begin(), answer.parts.end(), [&](const Part& part) {
    return part.shard < known->shards.size() && part.term < known->shards[part.shard].term;
  });
}

// The server knows another placement than this request was made for, or is gone. What is asked of several
// servers as one is ended with `why`, and asked anew as a whole.
void ClientProtocol::refused(const Request& request, Status why) {
  if (!is(request, Kind::push) && !is(request, Kind::pull) && !is(request, Kind::sync)) {
    machine_.answered(request.server, request.header.request, std::move(why));
    return;
  }
  move_open(request, homeless_);
}

// Where memory runs out it stays where it was: what is nowhere would be sent by nobody.
void ClientProtocol::move_open(const Request& request, std::vector<std::shared_ptr<Request>>& to) {
  to.emplace_back();
  to.back() = machine_.withdraw(request.server, request.header.request);
  if (to.back() == nullptr) to.pop_back();
}

bool ClientProtocol::set_placement(Placement placement) {
  const auto before = builder_.placement();
  if (placement.version <= before->version) return false;
  machine_.grow(placement.servers.size());
  learn_names(placement);
  placement.any_copy = before->any_copy;
  const auto now = std::make_shared<const Placement>(std::move(placement));
  // The new one holds last: where memory runs out before, whoever brought it can bring it again.
  for (uint32_t i = 0; i < before->servers.size(); ++i) {
    if (!before->is_up(i) || now->is_up(i)) continue;
    for (const auto& request : machine_.open_requests(i)) {
      const bool writes_here =
          is(*request, Kind::pull) && !request->parts.empty() && request->parts[0].values_segment != 0;
      if (writes_here) {
        request->given_up = true;
        move_open(*request, strays_);
      } else {
        refused(*request, gone(i));
      }
    }
  }
  builder_.set_placement(now);
  return true;
}

std::vector<uint32_t> ClientProtocol::send_homeless() {
  std::vector<uint32_t> servers;
  while (!homeless_.empty()) {
    const std::shared_ptr<Request> request = homeless_.front();
    const auto routed = route(std::make_shared<Request>(*request));
    if (!std::all_of(routed.begin(), routed.end(), [&](const auto& one) { return reaches(*one); })) {
      strays_.push_back(request);
      homeless_.erase(homeless_.begin());
      continue;
    }
    servers.reserve(servers.size() + routed.size());
    for (size_t added = 0; added < routed.size(); ++added) {
      try {
        machine_.add(routed[added]);
      } catch (...) {  // wholly or not at all: it is tried again
        while (added-- > 0) machine_.answered(routed[added]->server, routed[added]->header.request, {});
        throw;
      }
      servers.push_back(routed[added]->server);
    }
    machine_.seal(*request->operation);
    homeless_.erase(homeless_.begin());
  }
  return servers;
}

std::vector<std::shared_ptr<Request>> ClientProtocol::unanswered() const {
  std::vector<std::shared_ptr<Request>> requests = homeless_;
  requests.insert(requests.end(), strays_.begin(), strays_.end());
  for (uint32_t i = 0; i < names_.size(); ++i) {
    const auto open = machine_.open_requests(i);
    requests.insert(requests.end(), open.begin(), open.end());
  }
  return requests;
}

Loss ClientProtocol::taken_over(uint16_t shard, const Shard::Began& began) {
  const Loss loss = acknowledged_.taken_over(shard, began);
  if (loss.version > began.version) builder_.note_version(shard, kNoVersion);  // versions begin anew
  return loss;
}

}  // namespace shoal
