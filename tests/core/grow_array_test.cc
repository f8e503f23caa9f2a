#include "base/grow_array.h"

#include <cstdint>
#include <cstring>
#include <utility>

#include "check.h"

using namespace shoal;

namespace {

bool aligned(const GrowArray& array) { return reinterpret_cast<uintptr_t>(array.data()) % 64 == 0; }

// Each byte of [0, end) that was written before `from` is `value`; the others are zero.
bool holds(const GrowArray& array, size_t end, size_t written, std::byte value) {
  for (size_t i = 0; i < end; ++i) {
    if (array.data()[i] != (i < written ? value : std::byte{0})) {
      return false;
    }
  }
  return true;
}

}  // namespace

TEST(an_array_begins_empty) {
  GrowArray array;
  CHECK_EQ(array.capacity(), 0);
  CHECK(array.data() == nullptr);
  array.reset();
}

// Over every change of where the memory comes from: heap, mapping, huge pages.
TEST(an_array_keeps_its_content_and_zeroes_what_is_new) {
  const size_t k = 1024;
  GrowArray array;
  size_t written = 0;
  for (const size_t size : {size_t{1}, size_t{65}, 4 * k, 255 * k, 256 * k, 257 * k, 1024 * k, 4095 * k,
                            4096 * k, 5000 * k, 9000 * k, 20'000 * k}) {
    REQUIRE(array.reserve(size));
    CHECK(array.capacity() >= size);
    CHECK(aligned(array));
    CHECK(holds(array, array.capacity(), written, std::byte{0x5a}));
    written = array.capacity();
    std::memset(array.data(), 0x5a, written);
  }
}

TEST(an_array_never_shrinks) {
  GrowArray array;
  REQUIRE(array.reserve(100'000));
  const std::byte* const before = array.data();
  REQUIRE(array.reserve(10));
  CHECK(array.data() == before);
  CHECK(array.capacity() >= 100'000);
}

TEST(an_array_that_moves_leaves_nothing_behind) {
  for (const size_t size : {size_t{100}, size_t{300'000}, size_t{6'000'000}}) {
    GrowArray array;
    REQUIRE(array.reserve(size));
    array.data()[size - 1] = std::byte{7};
    GrowArray other(std::move(array));
    CHECK_EQ(array.capacity(), 0);  // NOLINT: that is the question
    CHECK(other.data()[size - 1] == std::byte{7});
    GrowArray third;
    REQUIRE(third.reserve(50));
    third = std::move(other);
    CHECK(third.data()[size - 1] == std::byte{7});
    third.reset();
    CHECK(third.data() == nullptr);
  }
}

TEST(an_array_that_cannot_grow_is_as_it_was) {
  for (const size_t size : {size_t{100}, size_t{300'000}, size_t{6'000'000}}) {
    GrowArray array;
    REQUIRE(array.reserve(size));
    array.data()[0] = std::byte{9};
    const size_t capacity = array.capacity();
    CHECK(!array.reserve(size_t{1} << 60));
    CHECK_EQ(array.capacity(), capacity);
    CHECK(array.data()[0] == std::byte{9});
  }
}
