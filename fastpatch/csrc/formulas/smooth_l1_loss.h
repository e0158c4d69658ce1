// Smooth L1: 0.5 d^2 / beta where |d| < beta, else |d| - 0.5 beta, with d = input - target (Girshick, Fast R-CNN,
// 2015).
//
// The order of operations is that of ATen's kernels (native/cpu/BinaryOpsKernel.cpp, PointwiseOpsKernel.cpp), in which
// the vector body and the scalar tail differ: the gradient's tail compares with and divides by beta in double.
// Edges: |d| == beta takes the linear branch; NaN stays NaN in both branches.
#pragma once

#include <cmath>

#ifdef CPU_CAPABILITY

#include "lanes.h"

namespace fastpatch::CPU_CAPABILITY {

// Division by beta with the bits of a quotient: not at all by one; by a product where 1 / beta is exact (a power of
// two). A quotient costs ten times a product, and one operation in ten less is 7 % for operands in the cache.
class DividedBy {
 public:
  explicit DividedBy(double beta) : reciprocal_(1 / beta) {
    int exponent = 0;
    const bool exact = std::frexp(beta, &exponent) == 0.5 && std::isnormal(static_cast<float>(reciprocal_));
    how_ = beta == 1 ? How::not_at_all : exact ? How::by_product : How::by_quotient;
  }

  template <class V, class Number>
  C10_ALWAYS_INLINE V operator()(const V& dividend, Number beta) const {
    return how_ == How::not_at_all   ? dividend
           : how_ == How::by_product ? dividend * V(static_cast<Number>(reciprocal_))
                                     : dividend / V(beta);
  }

 private:
  enum class How { not_at_all, by_product, by_quotient };

  double reciprocal_;
  How how_;
};

struct SmoothL1Loss {
  // float16 is rounded after each operation, bfloat16 at the end.
  template <class T>
  class Value {
   public:
    static constexpr Rounding rounding = std::is_same_v<T, c10::Half> ? Rounding::each : Rounding::last;
    using V = LanesOf<T, rounding>;

    explicit Value(double beta) : beta_(static_cast<Number>(beta)), divided_by_(static_cast<double>(beta_)) {}

    T operator()(T input, T target) const {
      const Number half(0.5);
      const Number z = std::abs(Number(input) - Number(target));
      const Number square = half * z * z / beta_;
      const Number line = z - half * beta_;
      return z < beta_ ? square : line;  // both: a branch on data is mispredicted too often
    }

    C10_ALWAYS_INLINE V operator()(const V& input, const V& target) const {
      const typename Lanes<V>::Number beta(beta_);
      const V half(0.5);
      const V z = (input - target).abs();
      return V::blendv(divided_by_(half * z * z, beta), z - half * V(beta), z >= V(beta));
    }

   private:
    using Number = NumberOf<T, rounding>;

    Number beta_;
    DividedBy divided_by_;
  };

  // Reduced types are rounded at the end.
  template <class T>
  class Gradient {
   public:
    using V = LanesOf<T, Rounding::last>;

    // norm: 1 / numel for the mean, else 1
    Gradient(double norm, double beta)
        : norm_(static_cast<Number>(norm)), beta_(beta), divided_by_(static_cast<Number>(beta)) {}

    T operator()(T input, T target, T grad_output) const {
      const Number d = Number(input) - Number(target);
      if (d <= -beta_) {
        return static_cast<T>(-norm_ * Number(grad_output));
      }
      if (d >= beta_) {
        return static_cast<T>(norm_ * Number(grad_output));
      }
      return static_cast<T>(norm_ * d * Number(grad_output) / beta_);
    }

    C10_ALWAYS_INLINE V operator()(const V& input, const V& target, const V& grad_output) const {
      const Number beta(beta_);
      const V d = input - target;
      const V sign = V::blendv(V(-1), V(1), d > V(0));
      return V(norm_) * V::blendv(divided_by_(d, beta), sign, d.abs() >= V(beta)) * grad_output;
    }

   private:
    using Number = NumberOf<T, Rounding::last>;

    Number norm_;
    double beta_;
    DividedBy divided_by_;
  };
};

}  // namespace fastpatch::CPU_CAPABILITY

#else

#include "device.h"

// As ATen's CUDA kernels (native/cuda/BinaryMiscOpsKernels.cu, PointwiseOpsKernel.cu) compute it: the difference and
// half of beta are rounded to T, the value once more at the end; the gradient after each operation. |d| == beta takes
// the square's branch in the gradient, where the CPU takes the line's.
namespace fastpatch::cuda {

template <class T>
struct SmoothL1Loss {
  using Number = Opmath<T>;

  Number beta;
  Number half_beta;
  Number norm;

  // norm: 1 / numel for the gradient of the mean, else 1
  SmoothL1Loss(double threshold, double norm)
      : beta(static_cast<Number>(static_cast<T>(threshold))),
        half_beta(rounded<T>(beta / 2)),
        norm(static_cast<Number>(static_cast<T>(norm))) {}

  FASTPATCH_DEVICE Number value(Number input, Number target) const {
    const Number z = magnitude(rounded<T>(difference(input, target)));
    return rounded<T>(z < beta ? quotient(product(product(Number(0.5), z), z), beta) : difference(z, half_beta));
  }

  FASTPATCH_DEVICE Number gradient(Number input, Number target, Number grad_output) const {
    const Number d = rounded<T>(difference(input, target));
    if (d < -beta) {
      return rounded<T>(product(-norm, grad_output));
    }
    if (d > beta) {
      return rounded<T>(product(norm, grad_output));
    }
    return rounded<T>(quotient(rounded<T>(product(rounded<T>(product(norm, d)), grad_output)), beta));
  }
};

}  // namespace fastpatch::cuda

#endif
