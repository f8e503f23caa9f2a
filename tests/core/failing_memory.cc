#include "failing_memory.h"

#include <cstdlib>
#include <new>

void* operator new(size_t bytes) {
  const bool fails = shoal::allocations_left >= 0 && shoal::allocations_left-- == 0;
  if (void* memory = fails ? nullptr : std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}

void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t /*bytes*/) noexcept { std::free(memory); }
