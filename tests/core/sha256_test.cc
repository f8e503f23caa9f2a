#include "base/sha256.h"

#include <string>
#include <string_view>
#include <vector>

#include "check.h"

using namespace shoal;

namespace {

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

std::string hex(const Digest& digest) {
  std::string text;
  for (const std::byte byte : digest) {
    text += "0123456789abcdef"[std::to_integer<size_t>(byte >> 4)];
    text += "0123456789abcdef"[std::to_integer<size_t>(byte & std::byte{15})];
  }
  return text;
}

std::string sha(std::string_view text) { return hex(sha256(bytes_of(text))); }
std::string hmac(std::string_view key, std::string_view text) {
  return hex(hmac_sha256(bytes_of(key), bytes_of(text)));
}

}  // namespace

TEST(sha256_matches_the_examples_of_fips_180) {
  CHECK_EQ(sha(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK_EQ(sha("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK_EQ(sha("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
           "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK_EQ(
      sha("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrs"
          "mnopqrstnopqrstu"),
      "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  CHECK_EQ(sha(std::string(1'000'000, 'a')),
           "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// 55 bytes are the last to leave room for the length in the same block. Values from Python's hashlib.
TEST(sha256_pads_right_at_the_edges_of_a_block) {
  CHECK_EQ(sha(std::string(55, 'x')), "d5e285683cd4efc02d021a5c62014694958901005d6f71e89e0989fac77e4072");
  CHECK_EQ(sha(std::string(56, 'x')), "04c26261370ee7541549d16dee320c723e3fd14671e66a099afe0a377c16888e");
  CHECK_EQ(sha(std::string(63, 'x')), "75220b47218278e656f2013bb8f0c455a25eaf01e86c64924e9d48d89776d6f2");
  CHECK_EQ(sha(std::string(64, 'x')), "7ce100971f64e7001e8fe5a51973ecdfe1ced42befe7ee8d5fd6219506b5393c");
  CHECK_EQ(sha(std::string(65, 'x')), "9537c5fdf120482f7d58d25e9ed583f52c02b4e304ea814db1633ad565aed7e9");
}

TEST(hmac_matches_the_examples_of_rfc_4231) {
  std::string counting;
  for (char c = 1; c <= 25; ++c) {
    counting += c;
  }
  CHECK_EQ(hmac(std::string(20, '\x0b'), "Hi There"),
           "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK_EQ(hmac("Jefe", "what do ya want for nothing?"),
           "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK_EQ(hmac(std::string(20, '\xaa'), std::string(50, '\xdd')),
           "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  CHECK_EQ(hmac(counting, std::string(50, '\xcd')),
           "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
}

TEST(hmac_hashes_a_key_longer_than_a_block_first) {
  CHECK_EQ(hmac(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First"),
           "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  CHECK_EQ(hmac(std::string(131, '\xaa'),
                "This is a test using a larger than block-size key and a larger than block-size data. The "
                "key needs "
                "to be hashed before being used by the HMAC algorithm."),
           "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST(digests_compare_equal_only_when_every_bit_is) {
  const Digest digest = sha256(bytes_of("abc"));
  CHECK(equal_constant_time(digest, sha256(bytes_of("abc"))));
  for (size_t bit = 0; bit < digest.size() * 8; ++bit) {
    Digest other = digest;
    other[bit / 8] ^= std::byte{1} << static_cast<int>(bit % 8);
    CHECK(!equal_constant_time(digest, other));
  }
}

TEST(nonces_differ) {
  const Digest first = random_nonce();
  CHECK(first != random_nonce());
  CHECK(first != Digest{});
}
