// Huber: 0.5 d^2 where |d| < delta, else delta (|d| - 0.5 delta), with d = input - target (Huber, Robust estimation of
// a location parameter, 1964).
//
// The order of operations is that of ATen's kernels (native/cpu/BinaryOpsKernel.cpp, PointwiseOpsKernel.cpp), in which
// the vector body and the scalar tail differ: the gradient's tail compares with delta, and multiplies by it, in double.
// Edges: |d| == delta takes the linear branch; NaN stays NaN in both branches.
#pragma once

#include <cmath>

#ifdef CPU_CAPABILITY

#include "lanes.h"

namespace fastpatch::CPU_CAPABILITY {

struct HuberLoss {
  // float16 is rounded at the end, bfloat16 after each operation.
  template <class T>
  class Value {
   public:
    static constexpr Rounding rounding = std::is_same_v<T, c10::BFloat16> ? Rounding::each : Rounding::last;
    using V = LanesOf<T, rounding>;

    explicit Value(double delta) : delta_(static_cast<Number>(delta)) {}

    T operator()(T input, T target) const {
      const Number half(0.5);
      const Number z = std::abs(Number(input) - Number(target));
      const Number square = half * z * z;
      const Number line = delta_ * (z - half * delta_);
      return z < delta_ ? square : line;  // both: a branch on data is mispredicted too often
    }

    C10_ALWAYS_INLINE V operator()(const V& input, const V& target) const {
      const V half(0.5), delta(delta_);
      const V z = (input - target).abs();
      return V::blendv(half * z * z, delta * (z - half * delta), z >= delta);
    }

   private:
    using Number = NumberOf<T, rounding>;

    Number delta_;
  };

  // Reduced types are rounded after each operation.
  template <class T>
  class Gradient {
   public:
    using V = LanesOf<T, Rounding::each>;

    // norm: 1 / numel for the mean, else 1
    Gradient(double norm, double delta)
        : norm_(static_cast<T>(norm)), delta_(delta), rounded_delta_(static_cast<T>(delta)) {}

    T operator()(T input, T target, T grad_output) const {
      const T d = input - target;
      if (d <= -delta_) {
        return static_cast<T>(-norm_ * grad_output * delta_);
      }
      if (d >= delta_) {
        return static_cast<T>(norm_ * grad_output * delta_);
      }
      return norm_ * d * grad_output;
    }

    C10_ALWAYS_INLINE V operator()(const V& input, const V& target, const V& grad_output) const {
      const V delta(rounded_delta_);
      const V d = input - target;
      const V sign = V::blendv(V(-1), V(1), d > V(0));
      return V(norm_) * V::blendv(d, sign * delta, d.abs() >= delta) * grad_output;
    }

   private:
    T norm_;
    double delta_;
    T rounded_delta_;
  };
};

}  // namespace fastpatch::CPU_CAPABILITY

#else

#include "device.h"

// As ATen's CUDA kernels (native/cuda/BinaryMiscOpsKernels.cu, PointwiseOpsKernel.cu) compute it: the difference and
// half of delta are rounded to T, the value once more at the end; the gradient after each operation. |d| == delta takes
// the square's branch in the gradient, where the CPU takes the line's.
namespace fastpatch::cuda {

template <class T>
struct HuberLoss {
  using Number = Opmath<T>;

  Number delta;
  Number half_delta;
  Number norm;

  // norm: 1 / numel for the gradient of the mean, else 1
  HuberLoss(double threshold, double norm)
      : delta(static_cast<Number>(static_cast<T>(threshold))),
        half_delta(rounded<T>(delta / 2)),
        norm(static_cast<Number>(static_cast<T>(norm))) {}

  FASTPATCH_DEVICE Number value(Number input, Number target) const {
    const Number z = magnitude(rounded<T>(difference(input, target)));
    return rounded<T>(z < delta ? product(product(Number(0.5), z), z) : product(delta, difference(z, half_delta)));
  }

  FASTPATCH_DEVICE Number gradient(Number input, Number target, Number grad_output) const {
    const Number d = rounded<T>(difference(input, target));
    if (d < -delta) {
      return rounded<T>(product(rounded<T>(product(-norm, grad_output)), delta));
    }
    if (d > delta) {
      return rounded<T>(product(rounded<T>(product(norm, grad_output)), delta));
    }
    return rounded<T>(product(rounded<T>(product(norm, d)), grad_output));
  }
};

}  // namespace fastpatch::cuda

#endif
