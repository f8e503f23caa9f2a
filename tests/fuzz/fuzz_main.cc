// Usage: fuzz_frames [--seconds N] [--runs N] [--seed N] [--corpus DIRECTORY] [--replay FILE]
//
// Feeds LLVMFuzzerTestOneInput with inputs made from a seed, where there is no libFuzzer: fresh ones, and
// mutations of earlier ones that took a way through the code that none had taken before. Those are kept, in
// the directory too if there is one, whose inputs are the first. An input that crashes is what lies in
// fuzz-input.bin afterwards: replay it with --replay.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "edges.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Bytes = std::vector<uint8_t>;

struct Options {
  uint64_t seed = 1;
  uint64_t runs = UINT64_MAX;
  double seconds = 10.0;
  std::string corpus;
  std::string replay;
};

constexpr size_t kInputMax = 20'000;

class Inputs {
 public:
  explicit Inputs(uint64_t seed) : random_(seed) {}

  void keep(Bytes input) { kept_.push_back(std::move(input)); }
  size_t kept() const { return kept_.size(); }

  Bytes next() {
    if (kept_.empty() || random_() % 16 == 0) return fresh();
    Bytes input = kept_[random_() % kept_.size()];
    for (uint64_t changes = 1 + random_() % 6; changes > 0; --changes) mutate(input);
    if (input.size() > kInputMax) input.resize(kInputMax);
    return input;
  }

 private:
  Bytes fresh() {
    Bytes input(random_() % (random_() % 16 == 0 ? kInputMax : 600));
    for (uint8_t& byte : input) {
      byte = static_cast<uint8_t>(random_());
    }
    return input;
  }

  void mutate(Bytes& input) {
    if (input.empty()) {
      input = fresh();
      return;
    }
    const size_t at = random_() % input.size();
    const auto offset = [](size_t n) { return static_cast<std::ptrdiff_t>(n); };
    switch (random_() % 5) {
      case 0: input[at] = static_cast<uint8_t>(random_()); break;
      case 1: input[at] = static_cast<uint8_t>(input[at] ^ (1u << (random_() % 8))); break;
      case 2: input.erase(input.begin() + offset(at)); break;
      case 3: input.insert(input.begin() + offset(at), static_cast<uint8_t>(random_())); break;
      default: {  // the rest of another one
        const Bytes& other = kept_[random_() % kept_.size()];
        const size_t from = random_() % (other.size() + 1);
        const Bytes rest(other.begin() + offset(from), other.end());  // of itself, perhaps
        input.resize(at);
        input.insert(input.end(), rest.begin(), rest.end());
      }
    }
  }

  std::mt19937_64 random_;
  std::vector<Bytes> kept_;
};

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    const std::string value = argv[i + 1];
    if (name == "--seconds") {
      options.seconds = std::stod(value);
    } else if (name == "--runs") {
      options.runs = std::stoull(value);
    } else if (name == "--seed") {
      options.seed = std::stoull(value);
    } else if (name == "--corpus") {
      options.corpus = value;
    } else if (name == "--replay") {
      options.replay = value;
    } else {
      std::fprintf(stderr, "unknown option %s\n", argv[i]);
      std::exit(2);
    }
  }
  return options;
}

Bytes read_input(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// The input under way is always in a file, where a crash leaves it.
class Runner {
 public:
  Runner(const Options& options, int file) : options_(options), file_(file), inputs_(options.seed) {}

  int run() {
    using Clock = std::chrono::steady_clock;
    const auto start = Clock::now();
    const auto seconds = [start] { return std::chrono::duration<double>(Clock::now() - start).count(); };
    if (!options_.corpus.empty()) {
      for (const auto& entry : std::filesystem::directory_iterator(options_.corpus))
        if (Bytes input = read_input(entry.path()); try_input(input)) inputs_.keep(std::move(input));
    }
    unsigned long long runs = 0;
    for (; runs < options_.runs && seconds() < options_.seconds; ++runs) {
      Bytes input = inputs_.next();
      if (!try_input(input)) continue;
      if (!options_.corpus.empty()) save(input);
      inputs_.keep(std::move(input));
    }
    std::printf("%llu inputs from seed %llu in %.0f s, %zu kept, %zu edges, no failure\n", runs,
                static_cast<unsigned long long>(options_.seed), seconds(), inputs_.kept(),
                edges::count_seen());
    return 0;
  }

 private:
  // True: it went where none was before.
  bool try_input(const Bytes& input) {
    if (pwrite(file_, input.data(), input.size(), 0) < 0 ||
        ftruncate(file_, static_cast<off_t>(input.size())) != 0) {
      std::exit(2);
    }
    edges::forget_path();
    LLVMFuzzerTestOneInput(input.data(), input.size());
    return edges::count_news() > 0;
  }

  void save(const Bytes& input) const {
    const auto name = std::to_string(options_.seed) + "-" + std::to_string(inputs_.kept());
    std::ofstream(options_.corpus + "/" + name, std::ios::binary)
        .write(reinterpret_cast<const char*>(input.data()), static_cast<std::streamsize>(input.size()));
  }

  const Options& options_;
  const int file_;
  Inputs inputs_;
};

int replay(const std::string& path) {
  const Bytes input = read_input(path);
  return LLVMFuzzerTestOneInput(input.data(), input.size());
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  if (!options.replay.empty()) {
    return replay(options.replay);
  }
  const char* const path = "fuzz-input.bin";
  const int file = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  const pid_t child = file < 0 ? -1 : fork();
  if (child < 0) {
    std::perror("fuzz_frames");
    return 2;
  }
  if (child == 0) {
    // Every refusal is logged, and almost everything here is refused: the child is silent, and what fails
    // in it fails again below, with its report.
    dup2(open("/dev/null", O_WRONLY | O_CLOEXEC), STDERR_FILENO);
    const int code = Runner(options, file).run();
    std::fflush(stdout);
    _exit(code);
  }
  int status = 0;
  if (waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0) {
    unlink(path);
    return 0;
  }
  std::fprintf(stderr, "seed %llu failed; its input is in %s, and once more:\n",
               static_cast<unsigned long long>(options.seed), path);
  replay(path);
  return 1;
}
