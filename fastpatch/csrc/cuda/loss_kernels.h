// The kernels of losses: what one thread does.
#pragma once

#include <c10/core/ScalarType.h>

#include "vectors.h"

namespace fastpatch::cuda {

constexpr int loss_threads = 512;  // of a block
constexpr int vectors_per_thread = 2;

// Two rows as a kernel takes them. Those of another type than T, float32, are converted as they are loaded.
struct Operands {
  const void* input;
  const void* target;
  c10::ScalarType input_type;
  c10::ScalarType target_type;
  int64_t n;
  bool aligned;
};

template <class T, bool mixed, int width>
FASTPATCH_DEVICE void load_operand(
    Opmath<T> (&numbers)[width], const void* row, c10::ScalarType type, int64_t begin, const Operands& in) {
  if constexpr (mixed) {
    if (type == c10::ScalarType::Half) {
      return load(numbers, static_cast<const c10::Half*>(row), begin, in.n, in.aligned);
    }
    if (type == c10::ScalarType::BFloat16) {
      return load(numbers, static_cast<const c10::BFloat16*>(row), begin, in.n, in.aligned);
    }
  }
  load(numbers, static_cast<const T*>(row), begin, in.n, in.aligned);
}

template <class T, bool mixed, int width>
FASTPATCH_DEVICE void load_operands(
    Opmath<T> (&input)[width], Opmath<T> (&target)[width], int64_t begin, const Operands& in) {
  load_operand<T, mixed>(input, in.input, in.input_type, begin, in);
  load_operand<T, mixed>(target, in.target, in.target_type, begin, in);
}

// Blocks that cover a row of n elements, in element-wise kernels.
template <class T>
int64_t elementwise_blocks(int64_t n) {
  constexpr int64_t covered = int64_t{loss_threads} * vectors_per_thread * vector_width<T>;
  return (n + covered - 1) / covered;
}

// The first element of a thread's k-th vector: neighbouring threads take neighbouring vectors.
template <class T>
FASTPATCH_DEVICE int64_t elementwise_begin(int64_t block, int thread, int k) {
  return ((block * vectors_per_thread + k) * loss_threads + thread) * vector_width<T>;
}

template <class Formula, class T, bool mixed>
__global__ void values_kernel(Operands in, T* output, Formula formula) {
  constexpr int width = vector_width<T>;
#pragma unroll
  for (int k = 0; k < vectors_per_thread; ++k) {
    const int64_t begin = elementwise_begin<T>(blockIdx.x, threadIdx.x, k);
    if (begin < in.n) {
      Opmath<T> input[width], target[width];
      load_operands<T, mixed>(input, target, begin, in);
#pragma unroll
      for (int i = 0; i < width; ++i) {
        input[i] = formula.value(input[i], target[i]);
      }
      store(output, input, begin, in.n, in.aligned);
    }
  }
}

template <class Formula, class T>
__global__ void gradient_kernel(
    Operands in, const T* grad_output, bool one_grad_output, T* grad_input, Formula formula) {
  constexpr int width = vector_width<T>;
#pragma unroll
  for (int k = 0; k < vectors_per_thread; ++k) {
    const int64_t begin = elementwise_begin<T>(blockIdx.x, threadIdx.x, k);
    if (begin < in.n) {
      Opmath<T> input[width], target[width], grad[width];
      load_operands<T, false>(input, target, begin, in);
      if (one_grad_output) {
        const auto one = static_cast<Opmath<T>>(*grad_output);
#pragma unroll
        for (int i = 0; i < width; ++i) {
          grad[i] = one;
        }
      } else {
        load(grad, grad_output, begin, in.n, in.aligned);
      }
#pragma unroll
      for (int i = 0; i < width; ++i) {
        input[i] = formula.gradient(input[i], target[i], grad[i]);
      }
      store(grad_input, input, begin, in.n, in.aligned);
    }
  }
}

// The sum of one number of each thread, in a tree; for thread 0.
template <class Number>
__device__ Number sum_of_block(Number number) {
  __shared__ Number numbers[loss_threads];
  const int thread = static_cast<int>(threadIdx.x);
  numbers[thread] = number;
  __syncthreads();
  for (int half = loss_threads / 2; half > 0; half /= 2) {
    if (thread < half) {
      numbers[thread] = sum(numbers[thread], numbers[thread + half]);
    }
    __syncthreads();
  }
  return numbers[0];
}

// Divided by what it is the mean of, or by one.
template <class T>
FASTPATCH_DEVICE void write_total(T* output, Opmath<T> total, Opmath<T> divisor) {
  *output = static_cast<T>(quotient(total, divisor));
}

// Each block's share of the sum, into partials; or all of it, if the block is alone, into output. Every lane of every
// thread's vectors adds up in order, then they are added in trees.
template <class Formula, class T, bool mixed>
__global__ void sum_kernel(Operands in, Opmath<T>* partials, T* output, Opmath<T> divisor, Formula formula) {
  constexpr int width = vector_width<T>;
  Opmath<T> sums[width] = {};
  const int64_t stride = int64_t{loss_threads} * gridDim.x * width;
#pragma unroll 4
  for (int64_t begin = (int64_t{blockIdx.x} * loss_threads + threadIdx.x) * width; begin < in.n; begin += stride) {
    Opmath<T> input[width], target[width];
    load_operands<T, mixed>(input, target, begin, in);
#pragma unroll
    for (int i = 0; i < width; ++i) {
      if (begin + i < in.n) {
        sums[i] = sum(sums[i], formula.value(input[i], target[i]));
      }
    }
  }
#pragma unroll
  for (int half = width / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) {
      sums[i] = sum(sums[i], sums[i + half]);
    }
  }
  const Opmath<T> total = sum_of_block(sums[0]);
  if (threadIdx.x == 0) {
    if (gridDim.x == 1) {
      write_total(output, total, divisor);
    } else {
      partials[blockIdx.x] = total;
    }
  }
}

// Of the blocks' shares, at most one for each thread; one block.
template <class T>
__global__ void total_kernel(const Opmath<T>* partials, int64_t n, T* output, Opmath<T> divisor) {
  const Opmath<T> total = sum_of_block(threadIdx.x < n ? partials[threadIdx.x] : Opmath<T>(0));
  if (threadIdx.x == 0) {
    write_total(output, total, divisor);
  }
}

}  // namespace fastpatch::cuda
