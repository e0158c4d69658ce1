// Loops over raw memory for SGD, one set for each CPU capability.
#pragma once

#include <cstdint>

namespace fastpatch {

struct SgdHyper {
  float weight_decay;
  float momentum;
  float one_minus_dampening;
  float minus_lr;
  bool decay;  // weight_decay != 0, judged before it was rounded to float32
  bool has_momentum;
  bool nesterov;
  bool maximize;
};

// One parameter: n elements each. Without momentum, buffer is null; at its first step it is written, not read.
struct SgdSlice {
  float* param;
  const float* grad;
  float* buffer;
  int64_t n;
  bool first;
};

using SgdKernel = void (*)(const SgdHyper& hyper, const SgdSlice& slice);

namespace DEFAULT {
SgdKernel sgd_kernel();
}
namespace AVX2 {
SgdKernel sgd_kernel();
}
namespace AVX512 {
SgdKernel sgd_kernel();
}

}  // namespace fastpatch
