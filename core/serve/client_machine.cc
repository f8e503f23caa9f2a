#include "serve/client_machine.h"

#include <algorithm>
#include <cassert>

#include "base/mutants.h"
#include "store/dedupe.h"

namespace shoal {

ClientMachine::ClientMachine(uint64_t client, uint32_t incarnation, size_t servers)
    : client_(client), incarnation_(incarnation), servers_(servers) {}

bool ClientMachine::begin(Operation& operation, bool is_push) {
  assert(operation.open_ == 0 && operation.seq_ == 0);
  if (is_push) {
    if (next_seq_ >= low() + kOpenPushesMax && !SHOAL_MUTANT(window_ignored)) return false;
    operation.seq_ = next_seq_++;
    open_seqs_.insert(operation.seq_);
  }
  operation.open_ = 1;
  ++operations_open_;
  return true;
}

// Memory that it holds on to.
size_t ClientMachine::bytes_of(const Request& request) {
  size_t bytes = request.blocks.empty() ? request.body_bytes : 0;
  for (const auto& block : request.blocks) bytes += block->bytes().size();
  return bytes;
}

void ClientMachine::add(std::shared_ptr<Request> request) {
  Operation& operation = *request->operation;
  PerServer& server = servers_[request->server];
  const uint64_t number = next_request_++;
  request->header.client = client_;
  request->header.incarnation = incarnation_;
  request->header.request = number;
  request->header.seq = operation.seq_;
  assert(operation.open_ > 0);
  // Where memory runs out it was not added.
  const auto open = server.open.emplace(number, std::move(request)).first;
  try {
    server.unsent.push_back(number);
  } catch (...) {
    server.open.erase(open);
    throw;
  }
  ++operation.open_;
  server.bytes_open += bytes_of(*open->second);
}

std::shared_ptr<Request> ClientMachine::next_to_send(uint32_t server) {
  PerServer& s = servers_[server];
  if (s.unsent.empty()) return nullptr;
  const uint64_t number = s.unsent.front();
  s.sent.insert(number);  // may throw
  s.unsent.pop_front();
  const std::shared_ptr<Request>& request = s.open.at(number);
  request->header.low = SHOAL_MUTANT(low_too_high) ? next_seq_ : low();
  return request;
}

std::shared_ptr<Request> ClientMachine::find(uint32_t server, uint64_t request) const {
  const auto it = servers_[server].open.find(request);
  return it == servers_[server].open.end() ? nullptr : it->second;
}

void ClientMachine::seal(Operation& operation, Status status) {
  if (!status.ok() && operation.status_.ok()) operation.status_ = std::move(status);
  close_one(operation);
}

void ClientMachine::close_one(Operation& operation) {
  assert(operation.open_ > 0);
  if (--operation.open_ > 0) {
    if (SHOAL_MUTANT(ack_too_early)) operation.done_.store(true, std::memory_order_release);
    return;
  }
  if (operation.seq_ != 0) open_seqs_.erase(operation.seq_);
  --operations_open_;
  operation.done_.store(true, std::memory_order_release);
}

std::shared_ptr<Request> ClientMachine::withdraw(uint32_t server, uint64_t number) {
  PerServer& s = servers_[server];
  const auto it = s.open.find(number);
  if (it == s.open.end()) return nullptr;
  std::shared_ptr<Request> request = std::move(it->second);
  s.open.erase(it);
  if (s.sent.erase(number) == 0)
    std::erase(s.unsent, number);  // answered to an earlier sending, before it was sent again
  s.bytes_open -= bytes_of(*request);
  return request;
}

std::vector<std::shared_ptr<Request>> ClientMachine::open_requests(uint32_t server) const {
  std::vector<std::shared_ptr<Request>> requests;
  for (const auto& [number, request] : servers_[server].open) requests.push_back(request);
  return requests;
}

void ClientMachine::answered(uint32_t server, uint64_t number, Status status) {
  const std::shared_ptr<Request> request = withdraw(server, number);
  if (request == nullptr) return;
  seal(*request->operation, std::move(status));
}

void ClientMachine::lost(uint32_t server) {
  PerServer& s = servers_[server];
  retries_ += s.sent.size();
  if (SHOAL_MUTANT(retry_renamed)) {
    for (const uint64_t number : s.sent) {
      uint64_t& seq = s.open.at(number)->header.seq;
      seq = seq == 0 ? 0 : next_seq_++;
    }
  }
  if (SHOAL_MUTANT(never_again)) s.sent.clear();
  // Request numbers grow with time, and whatever was sent is older than what was not.
  s.unsent.insert(s.unsent.begin(), s.sent.begin(), s.sent.end());
  s.sent.clear();
}

void ClientMachine::fail(uint32_t server, const Status& status) {
  while (!servers_[server].open.empty()) answered(server, servers_[server].open.begin()->first, status);
}

bool ClientMachine::writing() const {
  const auto commits = [](const auto& entry) {
    return entry.second->header.kind == static_cast<uint16_t>(Kind::commit);
  };
  return !open_seqs_.empty() || std::any_of(servers_.begin(), servers_.end(), [&](const PerServer& server) {
    return std::any_of(server.open.begin(), server.open.end(), commits);
  });
}

std::vector<uint32_t> ClientMachine::waited_for(const Operation& operation) const {
  std::vector<uint32_t> owing;
  for (uint32_t i = 0; i < servers_.size(); ++i) {
    for (const auto& [number, request] : servers_[i].open) {
      if (request->operation.get() == &operation) {
        owing.push_back(i);
        break;
      }
    }
  }
  return owing;
}

}  // namespace shoal
