// A server's side of one connection, without I/O: frames in, reply frames out. The epoll driver and the
// simulator run this same code.
//
// Order on a connection: hello, challenge, proof, welcome; then requests, answered in order but for
// those to the sync shard, whose answers may wait for other workers. Anything else is refused, and a refusal
// ends this connection only.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/pool.h"
#include "base/sha256.h"
#include "base/work_crew.h"
#include "net/shm.h"
#include "serve/chain.h"
#include "serve/sync_desk.h"
#include "store/store.h"
#include "wire/frame.h"

namespace shoal {

// Where a session's replies go. `begin` gives the place for one frame, `finish` sends it; a frame that was
// begun and not finished is dropped by the next `begin`.
class ReplySink {
 public:
  struct Draft {
    Part* parts;
    std::byte* body;
  };
  virtual ~ReplySink() = default;
  virtual bool room() const = 0;  // false: the peer reads too slowly; go on later
  virtual Draft begin(size_t parts, size_t body_bytes) = 0;
  virtual void finish(Header header) = 0;

  // A frame without parts.
  void send(const Header& header, std::span<const std::byte> body) {
    const Draft draft = begin(0, body.size());
    std::copy(body.begin(), body.end(), draft.body);
    finish(header);
  }
};

// Warm memory for frames. Not a vector: that would clear every byte before it is written.
struct ReplyBuffer {
  std::unique_ptr<std::byte[]> bytes;
  size_t capacity = 0;
};
using ReplyBuffers = Pool<ReplyBuffer>;

struct ServerCounters {
  std::atomic<uint64_t> connections{0};       // that proved the token, ever
  std::atomic<uint64_t> connections_open{0};  // now, proved or not
  std::atomic<uint64_t> refused{0}, pushes{0}, duplicates{0}, pulls{0};
  std::atomic<uint64_t> rows_pushed{0}, rows_pulled{0}, bytes_in{0}, bytes_out{0};
};

inline constexpr size_t kReplyBuffersKept = 16;  // by all connections together, a few MiB each

// What all sessions of a server share.
class ServerState {
 public:
  ServerState(
      uint32_t shards, std::vector<std::byte> the_token, size_t helpers, bool weak = false,
      std::function<void()> wake_chain = [] {})
      : store(shards), crew(helpers), chain(std::move(wake_chain), weak), token(std::move(the_token)) {}

  // The places of this server's shards in their chains, as of the placement `version`.
  void place(uint32_t version, std::span<const ChainPlace> places);

  Store store;
  WorkCrew crew;
  SyncDesk sync;
  Chain chain;
  std::atomic<uint32_t> placement{0};  // the version that was learnt
  std::atomic<bool> diverged{false};  // it could not apply what the server before it has applied: to be ended
  const std::vector<std::byte> token;
  ReplyBuffers reply_buffers{kReplyBuffersKept};

  ServerCounters counters;

  // One per client: held while a request of that client runs, so that once a new connection was
  // welcomed, no request of an older one can still write into the client's memory.
  struct Gate {
    std::mutex mutex;
    uint64_t session = 0;  // the one that may run; guarded by mutex
  };
  std::shared_ptr<Gate> gate(uint64_t client);
  void leave(uint64_t client, std::shared_ptr<Gate>& gate);  // a session ends
  uint64_t next_session() { return ++sessions_; }

 private:
  std::mutex mutex_;
  std::vector<uint32_t> terms_;  // of `place`, by shard; guarded by mutex_
  std::mutex gates_mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<Gate>> gates_;  // of open sessions; guarded by gates_mutex_
  std::atomic<uint64_t> sessions_{0};
};

class Session {
 public:
  enum class Outcome {
    done,   // the frame is answered
    later,  // the sink has no room: call again with the same frame
    close,  // end the connection once what is in the sink was sent
  };

  // `mail` takes the answers to sync requests, which may come when another session is served.
  explicit Session(ServerState& server, std::shared_ptr<Mailbox> mail = nullptr)
      : server_(server), mail_(std::move(mail)), number_(server.next_session()) {}
  ~Session() {
    if (gate_ != nullptr) server_.leave(client_, gate_);
  }

  // `descriptors`: file descriptors that came with the stream; taken from the front by `segment` frames.
  Outcome on_frame(const FrameView& frame, ReplySink& sink, std::vector<int>& descriptors);
  // Answers bytes that are no frame; the connection is then closed.
  void refuse(const Status& why, ReplySink& sink);

  uint64_t number() const { return number_; }
  bool proved() const { return phase_ == Phase::open; }

 private:
  enum class Phase { hello, proof, open, closed };

  Outcome on_hello(const FrameView& frame, ReplySink& sink);
  Outcome on_proof(const FrameView& frame, ReplySink& sink);
  Outcome on_request(const FrameView& frame, ReplySink& sink, std::vector<int>& descriptors);
  Outcome refuse_and_close(Status why, ReplySink& sink);

  Status add_segment(const FrameView& frame, std::vector<int>& descriptors);
  Outcome push(const FrameView& frame, ReplySink& sink);
  Outcome pull(const FrameView& frame, ReplySink& sink);
  // Rows of one part that go into one reply frame.
  struct PullPiece {
    const Part* part;
    PullPart request;
    size_t first;  // number of the first row within the whole request
    size_t at;     // in the frame's body
    size_t bytes;
  };
  Result<std::vector<PullPiece>> next_pieces(const FrameView& frame);
  void send_pieces(const FrameView& frame, const std::vector<PullPiece>& pieces, ReplySink& sink);
  Outcome pull_into_segments(const FrameView& frame, ReplySink& sink);
  Outcome scan(const FrameView& frame, ReplySink& sink);
  Outcome commit(const FrameView& frame, ReplySink& sink);
  Outcome sync(const FrameView& frame, ReplySink& sink);
  bool knows_placement(const FrameView& frame) const;

  // session_replica.cc
  // Neighbouring parts of one shard, which are one update of it.
  using Groups = std::vector<std::pair<size_t, size_t>>;
  Result<Groups> groups_of(std::span<const Part> parts) const;
  // Answers when the servers behind have it; at once where there are none.
  void answer_when_held(const Header& request, std::vector<Part> marks, std::vector<Part> parts,
                        const Status& status);
  std::vector<Part> send_on(std::span<const std::byte> commit, std::span<const Ack> acks);
  // Sends what is new of a push to the servers behind, with `header`.
  void send_on(const Header& header, std::span<const Part> parts, std::span<const PushPart> pushes,
               const Groups& groups, std::span<const Ack> acks);
  Outcome replicate(const FrameView& frame, ReplySink& sink);
  // Entries of a server before this one; those that came before their turn wait.
  struct Entries {
    Header header;
    std::vector<Part> parts;
    std::vector<std::byte> body;
    Groups groups;
    std::vector<Ack> acks;  // `unavailable`: not yet
  };
  static ptrdiff_t waiting(const std::vector<Ack>& acks);
  void try_early();
  Status try_entries(const FrameView& frame, const Groups& groups, std::vector<Ack>& acks);
  Ack replay(const FrameView& frame, std::span<const Part> parts, std::span<const PushPart> pushes);
  void finish_entries(const FrameView& frame, const Groups& groups, std::span<const Ack> acks,
                      const Status& status);
  Outcome image(const FrameView& frame, ReplySink& sink);
  Outcome figures(const FrameView& frame, ReplySink& sink);

  Status check_push(const FrameView& frame, std::vector<PushPart>& parts,
                    std::vector<std::vector<int64_t>>& copies) const;
  Result<PullPart> check_pull(const FrameView& frame, const Part& part) const;
  Ack pull_shown(uint16_t shard, const PullPart& request, const PullTarget& target);
  Result<std::span<const std::byte>> array(const FrameView& frame, uint16_t segment, uint32_t at,
                                           size_t bytes) const;
  static Header reply_header(const Header& request, const Status& status = {});
  static Outcome answer(const FrameView& frame, const Status& status, ReplySink& sink);
  static Outcome answer_parts(const FrameView& frame, std::span<const Ack> acks,
                              const std::function<const Part&(size_t)>& request, ReplySink& sink);

  ServerState& server_;
  const std::shared_ptr<Mailbox> mail_;
  const uint64_t number_;
  Phase phase_ = Phase::hello;
  uint64_t client_ = 0;
  uint32_t incarnation_ = 0;
  Digest client_nonce_{};
  Digest server_nonce_{};
  std::shared_ptr<ServerState::Gate> gate_;
  std::unordered_map<uint32_t, std::shared_ptr<Segment>> segments_;
  std::list<Entries> early_;
  // How far a pull that waits for room has come.
  struct Progress {
    size_t part = 0;
    size_t row = 0;  // within the part
  } progress_;
};

}  // namespace shoal
