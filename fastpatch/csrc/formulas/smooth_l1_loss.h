// Smooth L1: 0.5 d^2 / beta where |d| < beta, else |d| - 0.5 beta, with d = input - target (Girshick, Fast R-CNN,
// 2015).
//
// The order of operations is that of ATen's kernels (native/cpu/BinaryOpsKernel.cpp, PointwiseOpsKernel.cpp), in which
// the vector body and the scalar tail differ: the gradient's tail compares with and divides by beta in double.
// Edges: |d| == beta takes the linear branch; NaN stays NaN in both branches. Half of beta must be a normal float: then
// it is exact, and whether stock's compiler contracted the linear branch can't show.
#pragma once

#include <cmath>

#include <ATen/cpu/vec/vec.h>

namespace fastpatch::CPU_CAPABILITY {

// How to divide by beta with the bits of a quotient: not at all by one; by a product where 1 / beta is exact (a power
// of two). A quotient costs ten times a product, and one operation in ten less is 7 % for operands in the cache.
enum class Division { none, product, quotient };

inline Division division_by(float beta) {
  int exponent = 0;
  const bool exact = std::frexp(beta, &exponent) == 0.5f && std::isnormal(1.0f / beta);
  return beta == 1.0f ? Division::none : exact ? Division::product : Division::quotient;
}

template <Division division>
struct SmoothL1Loss {
  using Vec = at::vec::Vectorized<float>;

  float beta;

  float value(float input, float target) const {
    const float z = std::abs(input - target);
    return z < beta ? 0.5f * z * z / beta : z - 0.5f * beta;
  }

  Vec value(const Vec& input, const Vec& target) const {
    const Vec z = (input - target).abs();
    Vec square = Vec(0.5f) * z * z;
    if constexpr (division == Division::product) {
      square = square * Vec(1.0f / beta);
    } else if constexpr (division == Division::quotient) {
      square = square / Vec(beta);
    }
    return Vec::blendv(square, z - Vec(0.5f) * Vec(beta), z >= Vec(beta));
  }
};

struct SmoothL1LossGradient {
  using Vec = at::vec::Vectorized<float>;

  float norm;  // 1 / numel for the mean, else 1
  double beta;

  float value(float input, float target, float grad_output) const {
    const float d = input - target;
    if (d <= -beta) {
      return -norm * grad_output;
    }
    if (d >= beta) {
      return norm * grad_output;
    }
    return static_cast<float>(norm * d * grad_output / beta);
  }

  Vec value(const Vec& input, const Vec& target, const Vec& grad_output) const {
    const Vec d = input - target;
    const Vec width(static_cast<float>(beta));
    const Vec sign = Vec::blendv(Vec(-1.0f), Vec(1.0f), d > Vec(0.0f));
    return Vec(norm) * Vec::blendv(d / width, sign, d.abs() >= width) * grad_output;
  }
};

}  // namespace fastpatch::CPU_CAPABILITY
