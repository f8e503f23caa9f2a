// Clients and servers in one process, over every lane, with many threads: for TSan and ASan, and for the
// sums at the end. Gradients are whole numbers and lr is 1, so rows are counters.
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <random>
#include <thread>

#include "check.h"
#include "failing_memory.h"
#include "serve/server.h"
#include "serve/store_client.h"
#include "wire_talk.h"

using namespace shoal;

namespace {

constexpr uint32_t kShards = 16;
const std::string kToken = "the token of these tests";

Deadline soon() { return std::chrono::steady_clock::now() + std::chrono::seconds(60); }

struct Fleet {
  explicit Fleet(size_t count) {
    static std::atomic<int> number{0};
    for (size_t i = 0; i < count; ++i) {
      start(0, "@shoal-test-" + std::to_string(getpid()) + "-" + std::to_string(number++));
    }
  }

  bool start(uint16_t port, const std::string& path) {
    ServerOptions options;
    options.port = port;
    options.unix_path = path;
    options.token = bytes_of(kToken);
    options.shards = kShards;
    options.threads = 2;
    Result<std::unique_ptr<Server>> server = Server::start(std::move(options));
    CHECK(server.ok());
    if (server.ok()) {
      addresses.push_back({static_cast<uint32_t>(servers.size()), "127.0.0.1", (*server)->port(), path});
      servers.push_back(std::move(*server));
    }
    return server.ok();
  }

  std::unique_ptr<StoreClient> connect(Lane lane, uint64_t id,
                                       size_t shm_bytes_max = size_t{64} << 20) const {
    RemoteOptions options;
    options.identity = {id, 1, bytes_of(kToken), kShards};
    options.placement.servers = addresses;
    options.lane = lane;
    for (uint32_t shard = 0; shard < kShards; ++shard) {
      options.placement.shards.push_back({1, {shard % static_cast<uint32_t>(addresses.size())}});
    }
    options.shm_bytes_max = shm_bytes_max;
    auto client = connect_remote(std::move(options), soon());
    CHECK(client.ok());
    return client.ok() ? std::move(*client) : nullptr;
  }

  std::vector<std::unique_ptr<Server>> servers;
  std::vector<ServerAddress> addresses;
};

Status push(StoreClient& client, uint32_t table, const std::vector<int64_t>& keys, size_t dim, float value) {
  const std::vector<float> grads(keys.size() * dim, -value);
  const auto operation =
      client.push({{.table = table, .keys = keys, .values = grads, .lr = NAN}}, {}, soon());
  return operation.ok() ? client.wait(*operation, soon()) : operation.status();
}

Result<StoreClient::OperationPtr> start_pull(StoreClient& client, uint32_t table,
                                             std::optional<std::span<const int64_t>> keys) {
  const PullItem item{.table = table, .keys = keys};
  return client.pull({&item, 1}, Codec::fp32, soon());
}

std::vector<float> pull(StoreClient& client, uint32_t table, const std::vector<int64_t>& keys) {
  const auto operation = start_pull(client, table, keys);
  if (!operation.ok() || !client.wait(*operation, soon()).ok()) {
    return {};
  }
  const ClientOperation& done = **operation;
  return {done.out, done.out + done.rows * done.row_floats};
}

std::vector<int64_t> first_keys(int64_t count) {
  std::vector<int64_t> keys;
  for (int64_t key = 0; key < count; ++key) {
    keys.push_back(key);
  }
  return keys;
}

// Pushes, pulls and questions, some waited for at once and some left to the background.
void work(StoreClient& client, uint32_t seed, int rounds) {
  std::mt19937 random(seed);
  std::vector<StoreClient::OperationPtr> left;
  for (int round = 0; round < rounds; ++round) {
    const auto keys = first_keys(random() % 20 == 0 ? 5000 : 1 + random() % 50);
    CHECK(push(client, 1, keys, 4, 1.0f).ok());
    CHECK(push(client, 2, {0}, 3, 1.0f).ok());
    auto later = start_pull(client, 1, keys);
    CHECK(later.ok());
    if (later.ok()) {
      client.leave(*later);
      left.push_back(*later);
    }
    const auto rows = pull(client, 1, {0});
    CHECK(rows.size() == 4 && rows[0] >= static_cast<float>(round + 1));
    if (round % 16 == 0) {
      CHECK(client.figures(1, soon()).ok());
      CHECK(client.scan(1, random() % kShards, 0, 100, soon()).ok());
      client.counters();
    }
  }
  for (const auto& operation : left) {
    CHECK(client.wait(operation, soon()).ok());
  }
}

void many_threads(Lane lane) {
  constexpr int kThreads = 3;
  constexpr int kRounds = 60;
  const Fleet fleet(2);
  std::vector<std::unique_ptr<StoreClient>> clients;
  for (uint64_t id = 1; id <= 2; ++id) {
    clients.push_back(fleet.connect(lane, id));
    REQUIRE(clients.back() != nullptr);
    REQUIRE(clients.back()->declare(make_table(1, 4), soon()).ok());
    REQUIRE(clients.back()->declare(make_table(2, 3), soon()).ok());
  }
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < 2 * kThreads; ++i) {
    threads.emplace_back([&clients, i] { work(*clients[i % 2], i, kRounds); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(pull(*clients[0], 1, {0}) == std::vector<float>(4, 2.0f * kThreads * kRounds));
  CHECK(pull(*clients[1], 2, {0}) == std::vector<float>(3, 2.0f * kThreads * kRounds));
}

}  // namespace

TEST(many_threads_over_tcp) { many_threads(Lane::tcp); }
TEST(many_threads_over_unix) { many_threads(Lane::unix_socket); }
TEST(many_threads_over_shm) { many_threads(Lane::shm); }

TEST(many_threads_on_an_embedded_store) {
  const auto client = make_embedded_client(kShards, 2);
  REQUIRE(client->declare(make_table(1, 4), soon()).ok());
  REQUIRE(client->declare(make_table(2, 3), soon()).ok());
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < 4; ++i) {
    threads.emplace_back([&client, i] { work(*client, i, 60); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(pull(*client, 2, {0}) == std::vector<float>(3, 240.0f));
}

TEST(large_batches_stream_over_every_lane) {
  const Fleet fleet(2);
  uint64_t id = 1;
  for (const Lane lane : {Lane::tcp, Lane::unix_socket, Lane::shm}) {
    // Shared memory that is too small for it all: part of a request then goes through the socket.
    const auto client = fleet.connect(lane, id++, size_t{8} << 20);
    REQUIRE(client != nullptr);
    REQUIRE(client->declare(make_table(1, 64), soon()).ok());
    const auto keys = first_keys(60'000);
    CHECK(push(*client, 1, keys, 64, 1.0f).ok());
    const auto rows = pull(*client, 1, keys);
    CHECK(rows == std::vector<float>(keys.size() * 64, static_cast<float>(id - 1)));
  }
}

TEST(tensors_of_several_pieces_over_every_lane) {
  const Fleet fleet(2);
  uint64_t id = 1;
  for (const Lane lane : {Lane::tcp, Lane::unix_socket, Lane::shm}) {
    const auto client = fleet.connect(lane, id++);
    REQUIRE(client != nullptr);
    const size_t size = 40 * size_t{kPieceFloats} + 7;
    REQUIRE(client->declare(make_table(5, size, true), soon()).ok());
    const std::vector<float> grad(size, -1.0f);
    const auto pushed =
        client->push({{.table = 5, .is_tensor = true, .values = grad, .lr = NAN}}, {}, soon());
    CHECK(pushed.ok() && client->wait(*pushed, soon()).ok());
    const auto pulled = start_pull(*client, 5, std::nullopt);
    REQUIRE(pulled.ok() && client->wait(*pulled, soon()).ok());
    const std::vector<float> expected(size, static_cast<float>(id - 1));
    CHECK(std::equal(expected.begin(), expected.end(), (*pulled)->out));
  }
}

// Nobody waits: the background thread alone must bring every operation to its end, also while others
// come, pump for a moment and go.
TEST(operations_left_alone_end_by_themselves) {
  const Fleet fleet(2);
  const auto client = fleet.connect(Lane::unix_socket, 1);
  REQUIRE(client != nullptr);
  REQUIRE(client->declare(make_table(1, 64), soon()).ok());
  const auto keys = first_keys(3000);
  std::atomic<bool> stop{false};
  std::vector<std::thread> busy;
  for (int i = 0; i < 3; ++i) {
    busy.emplace_back([&] {
      while (!stop) {
        pull(*client, 1, {1, 2, 3});
      }
    });
  }
  for (int round = 0; round < 40; ++round) {
    if (round == 20) {
      stop = true;
    }
    const auto operation = start_pull(*client, 1, keys);
    REQUIRE(operation.ok());
    client->leave(*operation);
    const auto end = soon();
    while (!(*operation)->done() && std::chrono::steady_clock::now() < end) {
      std::this_thread::yield();
    }
    CHECK((*operation)->done());
  }
  for (std::thread& thread : busy) {
    thread.join();
  }
}

TEST(a_client_that_is_closed_ends_what_is_open) {
  for (const Lane lane : {Lane::tcp, Lane::shm}) {
    const Fleet fleet(1);
    const auto client = fleet.connect(lane, 1);
    REQUIRE(client != nullptr);
    REQUIRE(client->declare(make_table(1, 4), soon()).ok());
    std::vector<std::thread> threads;
    std::atomic<int> working{0};
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] {
        Status status;
        while (status.ok()) {
          status = push(*client, 1, first_keys(200), 4, 1.0f);
          ++working;
        }
        CHECK(status.code() == Code::closed);
      });
    }
    while (working < 20) {
      std::this_thread::yield();
    }
    client->close();
    for (std::thread& thread : threads) {
      thread.join();
    }
    CHECK(push(*client, 1, {1}, 4, 1.0f).code() == Code::closed);
  }
}

// The servers go away under working threads and come back, empty, on the same ports: calls wait and then
// go on. (What they then say of the table, which nobody declared again, is not the point here.)
TEST(servers_that_stop_under_load_are_found_again) {
  for (const Lane lane : {Lane::tcp, Lane::unix_socket, Lane::shm}) {
    Fleet fleet(1);
    const auto client = fleet.connect(lane, 1);
    REQUIRE(client != nullptr);
    REQUIRE(client->declare(make_table(1, 4), soon()).ok());
    std::atomic<bool> stop{false};
    std::atomic<int> calls{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] {
        while (!stop) {
          const Code code = push(*client, 1, first_keys(100), 4, 1.0f).code();
          CHECK(code == Code::ok || code == Code::unknown_table);
          ++calls;
        }
      });
    }
    const auto await_calls = [&calls] {
      const int before = calls;
      while (calls < before + 20) {
        std::this_thread::yield();
      }
    };
    for (int restart = 0; restart < 5; ++restart) {
      await_calls();
      const ServerAddress address = fleet.addresses[0];
      fleet.servers.clear();
      fleet.addresses.clear();
      REQUIRE(fleet.start(address.port, address.unix_path));
    }
    await_calls();  // through the last one
    stop = true;
    for (std::thread& thread : threads) {
      thread.join();
    }
    CHECK(client->counters().reconnects >= 5);
  }
}

TEST(a_client_goes_on_wherever_its_memory_runs_out) {
  const Fleet fleet(2);
  uint64_t id = 1;
  for (const Lane lane : {Lane::tcp, Lane::shm}) {
    const auto client = fleet.connect(lane, id++);
    REQUIRE(client != nullptr);
    REQUIRE(client->declare(make_table(1, 4), soon()).ok());
    const auto keys = first_keys(40);
    for (int64_t enough = 0, had_enough = false; !had_enough; ++enough) {
      allocations_left = enough;
      try {
        [[maybe_unused]] const Status pushed = push(*client, 1, keys, 4, 1.0f);  // whether or not it could be
        pull(*client, 1, keys);
      } catch (const std::bad_alloc&) {
        allocations_left = -1;
      }
      had_enough = allocations_left >= 0;
      allocations_left = -1;
      REQUIRE(client->figures(1, soon()).ok());  // somebody else can pump
    }
    client->close();
  }
}
