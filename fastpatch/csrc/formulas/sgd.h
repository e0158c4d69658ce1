// SGD with momentum, as torch.optim.SGD's default (foreach=False, fused=False) rounds it:
//
//   g = -grad                     if maximize
//   g = g + weight_decay * p      if weight_decay != 0
//   b = g                         at the first step, else  b = b * momentum + (1 - dampening) * g
//   d = g + momentum * b          if nesterov, else  d = b
//   p = p - lr * d
//
// Each `x + alpha * y` is one operation of ATen's add kernel: a fused multiply-add where the capability has one, two
// roundings at DEFAULT. `b * momentum` is an operation of its own.
#pragma once

#include <cmath>

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

namespace fastpatch::CPU_CAPABILITY {

inline at::vec::Vectorized<float> add_scaled(
    const at::vec::Vectorized<float>& x, float alpha, const at::vec::Vectorized<float>& y) {
  return at::vec::fmadd(y, at::vec::Vectorized<float>(alpha), x);
}

inline float add_scaled(float x, float alpha, float y) {
#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
  return std::fma(y, alpha, x);
#else
  return x + alpha * y;
#endif
}

inline at::vec::Vectorized<float> negated(const at::vec::Vectorized<float>& x) {
  return x.neg();
}

inline float negated(float x) {
  return -x;
}

struct SgdScalars {
  float weight_decay;
  float momentum;
  float one_minus_dampening;
  float minus_lr;
};

enum class Momentum { none, first, later };

// V is float or Vectorized<float>; updates param and buffer in place.
template <bool maximize, bool decay, Momentum momentum, bool nesterov, class V>
inline void sgd_update(const SgdScalars& s, V& param, V grad, V& buffer) {
  if constexpr (maximize) {
    grad = negated(grad);
  }
  if constexpr (decay) {
    grad = add_scaled(grad, s.weight_decay, param);
  }
  if constexpr (momentum != Momentum::none) {
    buffer = momentum == Momentum::first ? grad : add_scaled(buffer * V(s.momentum), s.one_minus_dampening, grad);
    grad = nesterov ? add_scaled(grad, s.momentum, buffer) : buffer;
  }
  param = add_scaled(param, s.minus_lr, grad);
}

}  // namespace fastpatch::CPU_CAPABILITY
