// What formulas compute on in CUDA kernels: one number at a time, each operation rounded by itself.
//
// nvcc would fuse `a * b + c` wherever it sees one. These functions it leaves alone; fused() is the one that rounds
// once. Elsewhere than in device code they are the same operations on the CPU, where tests run the kernels.
#pragma once

#include <cmath>
#include <type_traits>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#ifdef __CUDACC__
#define FASTPATCH_DEVICE __host__ __device__ __forceinline__
#else
#define FASTPATCH_DEVICE inline
#endif

namespace fastpatch::cuda {

// What a number of type T is computed in.
template <class T>
using Opmath = std::conditional_t<std::is_same_v<T, double>, double, float>;

FASTPATCH_DEVICE float product(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

FASTPATCH_DEVICE double product(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

FASTPATCH_DEVICE float sum(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

FASTPATCH_DEVICE double sum(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dadd_rn(a, b);
#else
  return a + b;
#endif
}

FASTPATCH_DEVICE float difference(float a, float b) {
  return sum(a, -b);
}

FASTPATCH_DEVICE double difference(double a, double b) {
  return sum(a, -b);
}

FASTPATCH_DEVICE float quotient(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

FASTPATCH_DEVICE double quotient(double a, double b) {
#ifdef __CUDA_ARCH__
  return __ddiv_rn(a, b);
#else
  return a / b;
#endif
}

// a * b + c, rounded once
FASTPATCH_DEVICE float fused(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

FASTPATCH_DEVICE double fused(double a, double b, double c) {
#ifdef __CUDA_ARCH__
  return __fma_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

FASTPATCH_DEVICE float magnitude(float a) {
#ifdef __CUDA_ARCH__
  return fabsf(a);
#else
  return std::fabs(a);
#endif
}

FASTPATCH_DEVICE double magnitude(double a) {
#ifdef __CUDA_ARCH__
  return fabs(a);
#else
  return std::fabs(a);
#endif
}

// To the nearest number that T has, ties to even.
template <class T>
FASTPATCH_DEVICE Opmath<T> rounded(Opmath<T> number) {
  if constexpr (std::is_same_v<T, Opmath<T>>) {
    return number;
  } else {
    return static_cast<float>(static_cast<T>(number));
  }
}

}  // namespace fastpatch::cuda
