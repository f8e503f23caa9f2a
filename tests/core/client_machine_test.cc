#include "serve/client_machine.h"

#include "check.h"
#include "store/dedupe.h"

using namespace shoal;

namespace {

struct Op : Operation {};

std::shared_ptr<Request> request_of(const std::shared_ptr<Op>& operation, uint32_t server) {
  auto request = std::make_shared<Request>();
  request->operation = operation;
  request->server = server;
  return request;
}

// A push with one request to each of `servers`.
std::shared_ptr<Op> push(ClientMachine& machine, std::initializer_list<uint32_t> servers) {
  auto operation = std::make_shared<Op>();
  CHECK(machine.begin(*operation, true));
  for (const uint32_t server : servers) {
    machine.add(request_of(operation, server));
  }
  machine.seal(*operation);
  return operation;
}

std::vector<uint64_t> sent(ClientMachine& machine, uint32_t server) {
  std::vector<uint64_t> numbers;
  while (const auto request = machine.next_to_send(server)) {
    numbers.push_back(request->header.request);
  }
  return numbers;
}

using Numbers = std::vector<uint64_t>;

}  // namespace

TEST(an_operation_is_done_when_all_servers_answered) {
  ClientMachine machine(7, 3, 2);
  const auto operation = push(machine, {0, 1});
  const auto first = machine.next_to_send(0);
  const auto second = machine.next_to_send(1);
  CHECK(first->header.client == 7 && first->header.incarnation == 3);
  CHECK(first->header.seq == 1 && second->header.seq == 1);
  machine.answered(0, first->header.request, {});
  CHECK(!operation->done());
  CHECK(machine.waited_for(*operation) == std::vector<uint32_t>{1});
  machine.answered(1, second->header.request, {});
  CHECK(operation->done() && operation->status().ok());
  CHECK_EQ(machine.operations_open(), 0);
}

TEST(an_operation_without_requests_is_done_at_once) {
  ClientMachine machine(1, 1, 1);
  CHECK(push(machine, {})->done());
  CHECK_EQ(machine.low(), 2);
}

TEST(low_is_the_smallest_open_push) {
  ClientMachine machine(1, 1, 1);
  push(machine, {0});
  push(machine, {0});
  push(machine, {0});
  CHECK(sent(machine, 0) == (Numbers{1, 2, 3}));
  CHECK_EQ(machine.low(), 1);
  machine.answered(0, 2, {});
  CHECK_EQ(machine.low(), 1);
  machine.answered(0, 1, {});
  CHECK_EQ(machine.low(), 3);
  machine.answered(0, 3, {});
  CHECK_EQ(machine.low(), 4);
}

TEST(a_resent_push_has_its_seq_and_a_fresh_low) {
  ClientMachine machine(1, 1, 1);
  push(machine, {0});
  push(machine, {0});
  sent(machine, 0);
  machine.answered(0, 1, {});
  machine.lost(0);
  const auto again = machine.next_to_send(0);
  REQUIRE(again != nullptr);
  CHECK(again->header.seq == 2 && again->header.low == 2 && again->header.request == 2);
  CHECK_EQ(machine.retries(), 1);
}

TEST(at_most_256_pushes_are_open) {
  ClientMachine machine(1, 1, 1);
  for (uint64_t i = 0; i < kOpenPushesMax; ++i) {
    push(machine, {0});
  }
  Op late;
  CHECK(!machine.begin(late, true));
  Op pull;
  CHECK(machine.begin(pull, false));
  sent(machine, 0);
  machine.answered(0, 2, {});  // the window begins at the oldest, which is still open
  CHECK(!machine.begin(late, true));
  machine.answered(0, 1, {});
  CHECK(machine.begin(late, true));
}

TEST(what_was_lost_is_sent_again_in_order_before_what_is_new) {
  ClientMachine machine(1, 1, 2);
  push(machine, {0});
  push(machine, {0, 1});
  CHECK(sent(machine, 0) == (Numbers{1, 2}));
  push(machine, {0});
  machine.lost(0);
  CHECK(sent(machine, 0) == (Numbers{1, 2, 4}));
  CHECK(sent(machine, 1) == (Numbers{3}));  // the other server's are its own
}

TEST(a_request_is_answered_once) {
  ClientMachine machine(1, 1, 1);
  const auto operation = push(machine, {0});
  sent(machine, 0);
  machine.answered(0, 99, {Code::internal, "never asked"});
  CHECK(!operation->done());
  machine.answered(0, 1, {});
  machine.answered(0, 1, {Code::internal, "late"});
  CHECK(operation->done() && operation->status().ok());
  CHECK(machine.find(0, 1) == nullptr);
}

TEST(an_answer_to_an_earlier_sending_counts) {
  ClientMachine machine(1, 1, 1);
  const auto operation = push(machine, {0});
  sent(machine, 0);
  machine.lost(0);
  machine.answered(0, 1, {});
  CHECK(operation->done());
  CHECK(machine.next_to_send(0) == nullptr);
}

TEST(the_first_error_ends_the_operation_with_it_when_all_answered) {
  ClientMachine machine(1, 1, 2);
  const auto operation = push(machine, {0, 1});
  sent(machine, 0);
  sent(machine, 1);
  machine.answered(0, 1, {Code::fenced, "first"});
  CHECK(!operation->done());
  machine.answered(1, 2, {Code::internal, "second"});
  CHECK(operation->done() && operation->status().code() == Code::fenced);
}

TEST(a_server_that_fails_fails_its_requests_only) {
  ClientMachine machine(1, 1, 2);
  const auto here = push(machine, {0});
  const auto there = push(machine, {1});
  sent(machine, 0);
  machine.fail(0, {Code::refused, "no"});
  CHECK(here->done() && here->status().code() == Code::refused);
  CHECK(!there->done() && !machine.has_open(0) && machine.has_open(1));
}
