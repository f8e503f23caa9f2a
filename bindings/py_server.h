// The server as the binding files share it.
#pragma once

#include <memory>

#include "serve/server.h"

struct PyServer {
  std::unique_ptr<shoal::Server> server;
};
