// Errors as values. The core never throws across a layer: a function that can fail for a reason of the
// world's returns Status or Result<T>; `bindings/` alone turns them into exceptions. An assert is for
// our own mistakes, and no byte from the wire may trip one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace shoal {

// Split by what the caller can do about it. The numbers travel on the wire: never reuse one.
enum class Code : uint16_t {
  ok = 0,
  bad_input = 1,      // fix the call
  mismatch = 2,       // a table or tensor exists with other settings
  unknown_table = 3,  // open it first
  refused = 4,        // token, version, frame or request not accepted; the first three end the connection
  fenced = 5,         // a newer incarnation of this client exists
  unavailable = 6,    // the server cannot be reached; retried until the deadline
  timeout = 7,        // the deadline passed
  closed = 8,         // this client or server was closed
  internal = 9,       // our mistake; report it
  moved = 10,         // the shard is elsewhere, or at another term: learn the placement and send again
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::ok; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::ok;
  std::string message_;
};

// A value, or the Status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}
  Result(Status status) : status_(std::move(status)) {}

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  T& operator*() { return *value_; }
  const T& operator*() const { return *value_; }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace shoal
