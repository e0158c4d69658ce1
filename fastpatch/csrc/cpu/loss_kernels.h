// Loops over raw memory for the losses of two tensors, one set for each loss and CPU capability.
#pragma once

#include <cstdint>
#include <type_traits>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "../formulas/loss_formulas.h"

namespace fastpatch {

// Two rows of elements: in memory, or, where `read` isn't null, wherever that copies their elements [begin, begin + n)
// from.
template <class T>
struct LossOperands {
  const T* input = nullptr;
  const T* target = nullptr;
  void (*read)(const void* source, int64_t begin, int64_t n, T* input, T* target) = nullptr;
  const void* source = nullptr;
};

// `threshold` is beta or delta; T is what stock computes in.
template <class T>
struct LossKernelsOf {
  using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;

  // Sum of the losses of elements [begin, end), in the order of ATen's sum kernel.
  Sum (*sum)(const LossOperands<T>& operands, int64_t begin, int64_t end, double threshold);
  // The same after a cast of the losses to float32, as for the mean of a reduced type.
  float (*sum_in_float)(const LossOperands<T>& operands, int64_t begin, int64_t end, double threshold);
  // Sum of a row in memory.
  Sum (*sum_row)(const T* values, int64_t n);
  // output[i] = loss(input[i], target[i]) for [begin, end)
  void (*values)(T* output, const LossOperands<T>& operands, int64_t begin, int64_t end, double threshold);
  // The same for rows of columns, wherever they are: strides of output, input, target from column to column, then those
  // from row to row, in elements.
  void (*strided_values)(
      T* output,
      const T* input,
      const T* target,
      const int64_t* strides,
      int64_t columns,
      int64_t rows,
      double threshold);
  // grad_input[i] for one gradient of the output (grad_output[0] for all), or one each. One call covers what stock
  // gives one thread, or a multiple of four vectors of it: the last n % (2 * vector width) elements follow the scalar
  // formula. norm is 1 / numel for the mean, else 1. Null for a formula without a gradient.
  void (*gradient)(
      T* grad_input,
      const T* input,
      const T* target,
      const T* grad_output,
      bool one_grad_output,
      int64_t n,
      double norm,
      double threshold);
};

struct LossKernels {
  LossKernelsOf<float> float32;
  LossKernelsOf<double> float64;
  LossKernelsOf<c10::BFloat16> bfloat16;
  LossKernelsOf<c10::Half> float16;

  template <class T>
  const LossKernelsOf<T>& of() const {
    if constexpr (std::is_same_v<T, float>) {
      return float32;
    } else if constexpr (std::is_same_v<T, double>) {
      return float64;
    } else if constexpr (std::is_same_v<T, c10::BFloat16>) {
      return bfloat16;
    } else {
      return float16;
    }
  }
};

#define FASTPATCH_DECLARE(name, Formula) LossKernels name##_kernels();
namespace DEFAULT {
FASTPATCH_LOSS_FORMULAS(FASTPATCH_DECLARE)
}
namespace AVX2 {
FASTPATCH_LOSS_FORMULAS(FASTPATCH_DECLARE)
}
namespace AVX512 {
FASTPATCH_LOSS_FORMULAS(FASTPATCH_DECLARE)
}
#undef FASTPATCH_DECLARE

}  // namespace fastpatch
