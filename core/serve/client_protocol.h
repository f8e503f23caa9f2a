// What a client makes of answers and of placements, without I/O: it sees to requests whose shards are
// elsewhere, and keeps what was acknowledged. The socket client and the simulator run this same code.
// Not thread-safe; the builder may be used by others meanwhile.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "serve/acknowledged.h"
#include "serve/client_machine.h"
#include "serve/placement.h"
#include "serve/request_builder.h"

namespace shoal {

class ClientProtocol {
 public:
  ClientProtocol(uint64_t client, uint32_t incarnation, RequestBuilder& builder);

  ClientMachine& machine() { return machine_; }
  const ClientMachine& machine() const { return machine_; }

  // Whether what lies in our shared memory can be sent to this server (from now on, for as long as it is
  // one).
  void set_shares_memory(uint32_t server);
  // Adds a request, to where its shards are by the placement of now; gives the servers to send to.
  std::vector<uint32_t> submit(std::shared_ptr<Request> request);

  // An answer, in two halves: its operation takes what it brings (Operation::on_reply) between them, without
  // locks. `heard` gives the request that it is for, or null where there is nothing more to be done.
  std::shared_ptr<Request> heard(uint32_t server, const FrameView& answer);
  // How that went; true: no more answers to this request are waited for.
  bool taken(const Request& request, const FrameView& answer, Status status);

  // False: not newer than what is known. What was open with servers that are gone has to be sent again.
  bool set_placement(Placement placement);
  bool homeless() const { return !homeless_.empty(); }
  // Sends again, by the placement of now, what was refused because a shard is elsewhere; gives the servers.
  std::vector<uint32_t> send_homeless();
  // Pulls that a lost server was to write into shared memory, and may yet, or that are now for one which does
  // not reach it: they have to be made anew.
  // Gives one that `ready` is true of, or null.
  template <typename Ready>
  std::shared_ptr<Request> take_stray(Ready ready) {
    const auto found = std::find_if(strays_.begin(), strays_.end(), ready);
    if (found == strays_.end()) return nullptr;
    const std::shared_ptr<Request> stray = *found;
    strays_.erase(found);
    return stray;
  }
  bool strays() const { return !strays_.empty(); }

  // All that waits for an answer, also what is to be sent elsewhere: that names the server it was for.
  std::vector<std::shared_ptr<Request>> unanswered() const;

  // A server took the shard over: what is lost by that.
  Loss taken_over(uint16_t shard, const Shard::Began& began);
  const Acknowledged& acknowledged() const { return acknowledged_; }

 private:
  std::vector<std::shared_ptr<Request>> route(const std::shared_ptr<Request>& request);
  bool reaches(const Request& request) const;
  void refused(const Request& request, Status why);
  void move_open(const Request& request, std::vector<std::shared_ptr<Request>>& to);
  Status gone(uint32_t server) const { return {Code::moved, names_[server] + " is gone"}; }
  Status said(uint32_t server, const FrameView& answer) const;
  bool too_old(const FrameView& answer) const;
  void learn_names(const Placement& placement);

  RequestBuilder& builder_;
  ClientMachine machine_;
  Acknowledged acknowledged_;
  std::vector<std::string> names_;                  // of all servers that ever were
  std::vector<bool> shares_memory_;                 // by server
  std::vector<std::shared_ptr<Request>> homeless_;  // refused because their shards are elsewhere
  std::vector<std::shared_ptr<Request>> strays_;
};

}  // namespace shoal
