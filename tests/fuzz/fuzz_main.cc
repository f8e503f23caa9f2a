// Usage: fuzz_frames [--seconds N] [--runs N] [--seed N] [--replay FILE]
//
// Feeds LLVMFuzzerTestOneInput with inputs made from a seed, where there is no libFuzzer: fresh ones, and
// mutations of earlier ones (kept by chance: there is no coverage to tell which are good). An input that
// crashes is what lies in fuzz-input.bin afterwards: replay it with --replay.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Bytes = std::vector<uint8_t>;

struct Options {
  uint64_t seed = 1;
  uint64_t runs = UINT64_MAX;
  double seconds = 10.0;
  std::string replay;
};

class Inputs {
 public:
  explicit Inputs(uint64_t seed) : random_(seed) {}

  Bytes next() {
    Bytes input = corpus_.empty() || random_() % 4 == 0 ? fresh() : corpus_[random_() % corpus_.size()];
    for (uint64_t changes = random_() % 6; changes > 0; --changes) {
      mutate(input);
    }
    if (corpus_.size() < 256) {
      corpus_.push_back(input);
    } else if (random_() % 8 == 0) {
      corpus_[random_() % corpus_.size()] = input;
    }
    return input;
  }

 private:
  Bytes fresh() {
    Bytes input(random_() % (random_() % 16 == 0 ? 20'000 : 600));
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
        const Bytes other = corpus_.empty() ? fresh() : corpus_[random_() % corpus_.size()];
        input.resize(at);
        if (!other.empty()) {
          input.insert(input.end(), other.begin() + offset(random_() % other.size()), other.end());
        }
      }
    }
  }

  std::mt19937_64 random_;
  std::vector<Bytes> corpus_;
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
    } else if (name == "--replay") {
      options.replay = value;
    } else {
      std::fprintf(stderr, "unknown option %s\n", argv[i]);
      std::exit(2);
    }
  }
  return options;
}

// Runs inputs until the end; the one under way is always in `file`, where a crash leaves it.
int run(const Options& options, int file) {
  using Clock = std::chrono::steady_clock;
  const std::chrono::duration<double> time(options.seconds);
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(time);
  Inputs inputs(options.seed);
  unsigned long long runs = 0;
  for (; runs < options.runs && Clock::now() < end; ++runs) {
    const Bytes input = inputs.next();
    if (pwrite(file, input.data(), input.size(), 0) < 0 ||
        ftruncate(file, static_cast<off_t>(input.size())) != 0) {
      return 2;
    }
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("%llu inputs from seed %llu, no failure\n", runs,
              static_cast<unsigned long long>(options.seed));
  return 0;
}

int replay(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const Bytes input{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
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
    const int code = run(options, file);
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
