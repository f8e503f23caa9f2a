// Requests that were refused because their shards are elsewhere, until they are sent to where those are. The
// socket client and the simulator run this same code. Not thread-safe.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "serve/client_machine.h"
#include "serve/request_builder.h"

namespace shoal {

class Homeless {
 public:
  bool empty() const { return requests_.empty(); }

  // The server knows another placement than this request was made for, or is gone. What is asked of several
  // servers as one is ended with `why`, and asked anew as a whole. True: it is here now.
  bool take(ClientMachine& machine, const Request& request, Status why) {
    const auto kind = static_cast<Kind>(request.header.kind);
    if (kind != Kind::push && kind != Kind::pull && kind != Kind::sync) {
      machine.answered(request.server, request.header.request, std::move(why));
      return false;
    }
    auto taken = machine.withdraw(request.server, request.header.request);
    if (taken != nullptr) requests_.push_back(std::move(taken));
    return !requests_.empty();
  }

  // Whether the answer lets a worker go on that has yet to learn the placement by which others went on: it is
  // asked again, until this client knows that one.
  static bool too_new(const Request& request, const Header& answer, const Placement& known) {
    return request.header.kind == static_cast<uint16_t>(Kind::sync) && answer.member_term > known.version;
  }

  // Whether a push was acknowledged in a term that this client knows to be over. What is lost with that term
  // may have been counted already, so it is asked again: whoever has the push says so, and whoever has not
  // takes it.
  static bool too_old(const FrameView& answer, const Placement& known) {
    return std::any_of(answer.parts.begin(), answer.parts.end(), [&](const Part& part) {
      return part.shard < known.shards.size() && part.term < known.shards[part.shard].term;
    });
  }

  // Adds them again by the placement of now; gives the servers that have something to be sent.
  std::vector<uint32_t> send(ClientMachine& machine, const RequestBuilder& builder) {
    std::vector<uint32_t> servers;
    for (const auto& request : std::exchange(requests_, {})) {
      for (auto& one : builder.route(std::make_shared<Request>(*request))) {
        servers.push_back(one->server);
        machine.add(std::move(one));
      }
      machine.seal(*request->operation);
    }
    return servers;
  }

 private:
  std::vector<std::shared_ptr<Request>> requests_;
};

}  // namespace shoal
