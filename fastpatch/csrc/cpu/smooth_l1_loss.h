// Loops over raw memory for smooth L1, one set for each CPU capability.
#pragma once

#include <cstdint>

namespace fastpatch {

struct SmoothL1LossKernels {
  // Sum of n losses in the order of ATen's sum kernel.
  float (*sum)(const float* input, const float* target, int64_t n, float beta);
  // Sum of the partial sums of several threads, in that order too.
  float (*sum_partials)(const float* partials, int64_t n);
  // output[i] = loss(input[i], target[i])
  void (*values)(float* output, const float* input, const float* target, int64_t n, float beta);
  // grad_input[i] for one gradient of the output (grad_output[0] for all), or one each. One call covers what stock
  // gives one thread: the last n % (2 * vector width) elements follow the scalar formula.
  void (*gradient)(
      float* grad_input,
      const float* input,
      const float* target,
      const float* grad_output,
      bool one_grad_output,
      int64_t n,
      float norm,
      double beta);
};

namespace DEFAULT {
SmoothL1LossKernels smooth_l1_loss_kernels();
}
namespace AVX2 {
SmoothL1LossKernels smooth_l1_loss_kernels();
}
namespace AVX512 {
SmoothL1LossKernels smooth_l1_loss_kernels();
}

}  // namespace fastpatch
