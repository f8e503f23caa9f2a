// The one place where the core's Status becomes a Python exception, `_core.CoreError`. Call with the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <utility>

#include "base/status.h"

namespace shoal {

// Raises CoreError(code, message); `status` is not ok.
[[noreturn]] void raise(const Status& status);

// Raises unless ok.
void check(const Status& status);

// The value, or the exception.
template <typename T>
T take(Result<T> result) {
  check(result.status());
  return std::move(*result);
}

}  // namespace shoal

// Creates the class; before any other bind_ function.
void bind_errors(nanobind::module_& m);
