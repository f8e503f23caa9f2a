// One kernel, compiled once per CPU kind and chosen at run time. A kernel is a struct with a static
// always-inline `run`; `run_clone<Kernel>(args...)` calls the copy made for the kind in use.
//
// The copies must give the same bits: `run` may only use plain IEEE operations and integers, in an
// order that does not depend on the vector width. -ffp-contract=off is what keeps the compiler to that.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#define SHOAL_INLINE inline __attribute__((always_inline))
#define SHOAL_INLINE_LAMBDA __attribute__((always_inline))

#if defined(__x86_64__)
#define SHOAL_X86_CLONES 1
#define SHOAL_TARGET_AVX2 __attribute__((target("avx2")))
// Without the preference g++ stays at 256 bits. prfchw: every AVX-512 machine has it, and a prefetch
// for writing spares a row that another core wrote last a second trip.
#if defined(__clang__)
#define SHOAL_TARGET_AVX512 __attribute__((target("avx512f,avx512vl,avx512dq,avx512bw,prfchw")))
#else
#define SHOAL_TARGET_AVX512 \
  __attribute__((target("avx512f,avx512vl,avx512dq,avx512bw,prfchw,prefer-vector-width=512")))
#endif
#endif

namespace shoal {

// In rising order: a machine that runs one runs those before it.
enum class CpuKind : uint8_t { plain = 0, avx2 = 1, avx512 = 2 };

inline constexpr std::array<const char*, 3> cpu_kind_names = {"default", "avx2", "avx512"};

inline CpuKind best_cpu_kind() {
#ifdef SHOAL_X86_CLONES
  __builtin_cpu_init();  // this runs before main, perhaps before libgcc's own constructor
  if (!__builtin_cpu_supports("avx2")) return CpuKind::plain;
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
  return wide ? CpuKind::avx512 : CpuKind::avx2;
#else
  return CpuKind::plain;
#endif
}

// Process-wide on purpose: it can only ever change speed. Tests set it through `use_kernels`.
inline std::atomic<CpuKind> cpu_kind_in_use{best_cpu_kind()};

namespace detail {

template <typename Kernel, typename... Args>
auto clone_plain(Args... args) {
  return Kernel::run(args...);
}

#ifdef SHOAL_X86_CLONES
template <typename Kernel, typename... Args>
SHOAL_TARGET_AVX2 auto clone_avx2(Args... args) {
  return Kernel::run(args...);
}

template <typename Kernel, typename... Args>
SHOAL_TARGET_AVX512 auto clone_avx512(Args... args) {
  return Kernel::run(args...);
}
#endif

}  // namespace detail

// Arguments are copied: pass pointers and small structs.
template <typename Kernel, typename... Args>
auto run_clone(Args... args) {
#ifdef SHOAL_X86_CLONES
  switch (cpu_kind_in_use.load(std::memory_order_relaxed)) {
    case CpuKind::avx512: return detail::clone_avx512<Kernel, Args...>(args...);
    case CpuKind::avx2: return detail::clone_avx2<Kernel, Args...>(args...);
    case CpuKind::plain: break;
  }
#endif
  return detail::clone_plain<Kernel, Args...>(args...);
}

}  // namespace shoal
