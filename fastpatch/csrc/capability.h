// Which of ATen's CPU capabilities runs here, so that vector width and use of fused multiply-add are stock's.
#pragma once

#include <ATen/Version.h>

namespace fastpatch {

enum class Capability { DEFAULT, AVX2, AVX512 };

// ATen picks a capability for the process (the CPU's best, or ATEN_CPU_CAPABILITY), but registers few AVX512 kernels
// and runs the AVX2 one where there is none. `has_avx512_kernel` is the answer of the stub that stock calls.
inline Capability capability_of(bool has_avx512_kernel) {
  static const std::string name = at::get_cpu_capability();
  if (name == "DEFAULT") {
    return Capability::DEFAULT;
  }
  return name == "AVX512" && has_avx512_kernel ? Capability::AVX512 : Capability::AVX2;
}

// What a file compiled once per capability offers, e.g. FASTPATCH_CHOOSE(kernels, true) -> AVX512::kernels()
#define FASTPATCH_CHOOSE(function, has_avx512_kernel)                                                \
  (fastpatch::capability_of(has_avx512_kernel) == fastpatch::Capability::DEFAULT ? DEFAULT::function \
   : fastpatch::capability_of(has_avx512_kernel) == fastpatch::Capability::AVX2  ? AVX2::function    \
                                                                                 : AVX512::function)

}  // namespace fastpatch
