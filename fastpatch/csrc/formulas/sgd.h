// SGD with momentum, as torch.optim.SGD's default (foreach=False, fused=False) rounds it:
//
//   g = -grad                     if maximize
//   g = g + weight_decay * p      if weight_decay != 0
//   b = g                         at the first step, else  b = b * momentum + (1 - dampening) * g
//   d = g + momentum * b          if nesterov, else  d = b
//   p = p - lr * d
//
// Each `x + alpha * y` is one operation of ATen's add kernel, with alpha rounded to the tensors' dtype: a fused
// multiply-add where the capability has one, two roundings at DEFAULT. `b * momentum` is an operation of its own.
// bfloat16 and float16 are rounded after each operation. Their single numbers, which ATen meets at the end of a loop
// over vectors, take two roundings for `x + alpha * y` at every capability; and for `b * momentum` they, and their
// vectors, take momentum in float32, but with foreach=True rounded to their dtype.
#pragma once

#include <cmath>

#ifdef CPU_CAPABILITY

#include "lanes.h"

namespace fastpatch::CPU_CAPABILITY {

// What a product with a number is computed in.
template <class T>
using Opmath = std::conditional_t<is_reduced<T>, float, T>;

template <class T>
C10_ALWAYS_INLINE Vec<T> add_scaled(const Vec<T>& x, T alpha, const Vec<T>& y) {
  return at::vec::fmadd(y, Vec<T>(alpha), x);
}

template <class T>
C10_ALWAYS_INLINE Pair<T, Rounding::each> add_scaled(
    const Pair<T, Rounding::each>& x, T alpha, const Pair<T, Rounding::each>& y) {
  const float number = alpha;
#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
  const Pair<T, Rounding::each> sum{add_scaled(x.low, number, y.low), add_scaled(x.high, number, y.high)};
  return sum.rounded_if(Rounding::each);
#else
  return x + Pair<T, Rounding::each>(number) * y;
#endif
}

template <class T>
C10_ALWAYS_INLINE T add_scaled(T x, T alpha, T y) {
#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
  if constexpr (!is_reduced<T>) {
    return std::fma(y, alpha, x);
  }
#endif
  return x + alpha * y;
}

template <class T>
C10_ALWAYS_INLINE Vec<T> scaled(const Vec<T>& x, T factor) {
  return x * Vec<T>(factor);
}

template <class T>
C10_ALWAYS_INLINE Pair<T, Rounding::each> scaled(const Pair<T, Rounding::each>& x, float factor) {
  return x * Pair<T, Rounding::each>(factor);
}

template <class T>
C10_ALWAYS_INLINE T scaled(T x, Opmath<T> factor) {
  return static_cast<T>(static_cast<Opmath<T>>(x) * factor);
}

template <class T>
C10_ALWAYS_INLINE Vec<T> negated(const Vec<T>& x) {
  return x.neg();
}

template <class T>
C10_ALWAYS_INLINE Pair<T, Rounding::each> negated(const Pair<T, Rounding::each>& x) {
  return {x.low.neg(), x.high.neg()};
}

template <class T>
C10_ALWAYS_INLINE T negated(T x) {
  return -x;
}

template <class T>
struct SgdScalars {
  T weight_decay;
  Opmath<T> momentum;
  T nesterov_momentum;
  T one_minus_dampening;
  T minus_lr;
  bool maximize;
};

enum class Momentum { none, first, later };

// V is a vector, a pair of vectors or a number. Updates param and buffer in place, and makes grad the direction d.
template <bool decay, Momentum momentum, bool nesterov, class V, class T>
C10_ALWAYS_INLINE void sgd_update(const SgdScalars<T>& s, V& param, V& grad, V& buffer) {
  if (s.maximize) {
    grad = negated(grad);
  }
  if constexpr (decay) {
    grad = add_scaled(grad, s.weight_decay, param);
  }
  if constexpr (momentum != Momentum::none) {
    buffer = momentum == Momentum::first ? grad : add_scaled(scaled(buffer, s.momentum), s.one_minus_dampening, grad);
    grad = nesterov ? add_scaled(grad, s.nesterov_momentum, buffer) : buffer;
  }
  param = add_scaled(param, s.minus_lr, grad);
}

}  // namespace fastpatch::CPU_CAPABILITY

#else

#include "device.h"

// On CUDA each `x + alpha * y` is one fused multiply-add and one rounding to T, with alpha in Opmath<T>, in single
// operations and in foreach=True, the default there; and so is momentum in `b * momentum`.
namespace fastpatch::cuda {

template <class T>
struct SgdScalars {
  Opmath<T> weight_decay;
  Opmath<T> momentum;
  Opmath<T> one_minus_dampening;
  Opmath<T> minus_lr;
  bool decay;
  bool nesterov;
  bool maximize;
};

template <class T>
FASTPATCH_DEVICE Opmath<T> add_scaled(Opmath<T> x, Opmath<T> alpha, Opmath<T> y) {
  return rounded<T>(fused(alpha, y, x));
}

// Updates param and buffer in place, and makes grad the direction d. At a first step buffer is written, not read.
template <class T, bool has_momentum>
FASTPATCH_DEVICE void sgd_update(
    const SgdScalars<T>& s, bool first, Opmath<T>& param, Opmath<T>& grad, Opmath<T>& buffer) {
  if (s.maximize) {
    grad = -grad;
  }
  if (s.decay) {
    grad = add_scaled<T>(grad, s.weight_decay, param);
  }
  if constexpr (has_momentum) {
    buffer = first ? grad : add_scaled<T>(rounded<T>(product(buffer, s.momentum)), s.one_minus_dampening, grad);
    grad = s.nesterov ? add_scaled<T>(grad, s.momentum, buffer) : buffer;
  }
  param = add_scaled<T>(param, s.minus_lr, grad);
}

}  // namespace fastpatch::cuda

#endif
