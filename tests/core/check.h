// The core's test harness: tests register themselves, checks count failures and go on. No dependency,
// no fixtures, no mocks; a helper that two test files need belongs in a header beside this one.
//
//   TEST(a_free_block_is_reused) {
//     REQUIRE(arena != nullptr);          // ends this test when false
//     CHECK(arena->bytes_mapped() > 0);   // goes on when false
//     CHECK_EQ(offset, 64);               // goes on, and prints both values
//   }
//
// CHECK and CHECK_EQ may be used from any thread; REQUIRE only in the body of the test itself.
#pragma once

#include <concepts>
#include <cstddef>
#include <ostream>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>

namespace shoal::check {

// Adds a test to the run; the value only lets a namespace-scope constant be initialised with it.
bool add_test(const char* name, const char* file, void (*body)());
// Counts a failure against the test that runs, and prints it.
void fail(const char* file, int line, const std::string& message);

template <typename T>
concept Number =
    std::integral<T> && !std::same_as<T, bool> && !std::same_as<T, char> && !std::same_as<T, wchar_t> &&
    !std::same_as<T, char8_t> && !std::same_as<T, char16_t> && !std::same_as<T, char32_t>;

// Integers compare by value, so that CHECK_EQ(vector.size(), 3) needs no cast.
template <typename A, typename B>
bool equal(const A& a, const B& b) {
  if constexpr (Number<A> && Number<B>) {
    return std::cmp_equal(a, b);
  } else {
    return a == b;
  }
}

template <typename T>
std::string show(const T& value) {
  std::ostringstream text;
  if constexpr (std::is_enum_v<T>) {
    text << +static_cast<std::underlying_type_t<T>>(value);
  } else if constexpr (requires { text << value; }) {
    text << value;
  } else {
    text << "a value of " << sizeof(T) << " bytes";
  }
  return text.str();
}

template <typename A, typename B>
void check_equal(const A& a, const B& b, const char* file, int line, const char* expression) {
  if (!equal(a, b)) {
    fail(file, line, std::string(expression) + ": " + show(a) + " is not " + show(b));
  }
}

}  // namespace shoal::check

#define TEST(name)                                                   \
  static void shoal_test_##name();                                   \
  [[maybe_unused]] static const bool shoal_test_added_##name =       \
      ::shoal::check::add_test(#name, __FILE__, &shoal_test_##name); \
  static void shoal_test_##name()

#define CHECK(...)                                                              \
  do {                                                                          \
    if (!(__VA_ARGS__)) ::shoal::check::fail(__FILE__, __LINE__, #__VA_ARGS__); \
  } while (false)

#define CHECK_EQ(a, b) ::shoal::check::check_equal((a), (b), __FILE__, __LINE__, #a " == " #b)

#define REQUIRE(...)                                          \
  do {                                                        \
    if (!(__VA_ARGS__)) {                                     \
      ::shoal::check::fail(__FILE__, __LINE__, #__VA_ARGS__); \
      return;                                                 \
    }                                                         \
  } while (false)
