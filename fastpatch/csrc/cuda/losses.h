// The losses of two tensors on a CUDA device: raw memory, one set of launches for each loss. No launch waits for the
// device, and none allocates. Weak: without CUDA kernels in the library the functions' addresses are null.
#pragma once

#include <cstdint>

#include <c10/core/ScalarType.h>

#include "../formulas/loss_formulas.h"

namespace fastpatch::cuda {

// Two rows of n elements. `type` is what stock computes in: that of both, or float32.
struct LossRows {
  int device;
  const void* input;
  const void* target;
  c10::ScalarType input_type;
  c10::ScalarType target_type;
  c10::ScalarType type;
  int64_t n;
  double threshold;  // beta or delta
};

// How many threads' blocks add up a row, which depends on nothing but its length: so does the order of additions, and
// the same row gives the same bits on every device.
constexpr int64_t largest_lone_block = 16384;  // elements
constexpr int64_t elements_per_block = 4096;
constexpr int64_t most_blocks = 512;

constexpr int64_t blocks_of_sum(int64_t n) {
  const int64_t blocks = (n + elements_per_block - 1) / elements_per_block;
  return n <= largest_lone_block ? 1 : blocks < most_blocks ? blocks : most_blocks;
}

struct LossKernels {
  // output[i] = loss(input[i], target[i]), in `type`
  void (*values)(const LossRows& rows, void* output);
  // Their sum or mean: float32 is added in float32, and so are bfloat16 and float16; float64 in float64. `partials` has
  // room for blocks_of_sum(n) numbers of that type, unless that is one.
  void (*reduced)(const LossRows& rows, bool mean, void* partials, void* output);
  // grad_input[i], in the type of all operands, for one gradient of the output or one each. Null for a formula without
  // a gradient.
  void (*gradient)(const LossRows& rows, const void* grad_output, bool one_grad_output, bool mean, void* grad_input);
};

#define FASTPATCH_DECLARE(name, Formula) __attribute__((weak)) LossKernels name##_kernels();
FASTPATCH_LOSS_FORMULAS(FASTPATCH_DECLARE)
#undef FASTPATCH_DECLARE

}  // namespace fastpatch::cuda
