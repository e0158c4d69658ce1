#include "sgd.h"

#include "../formulas/sgd.h"

namespace fastpatch::CPU_CAPABILITY {
namespace {

template <class T, bool decay, Momentum momentum, bool nesterov, bool stores_grad = false>
void run(const SgdScalars<T>& scalars, const SgdSlice& slice) {
  using V = LanesOf<T, Rounding::each>;
  using L = Lanes<V>;
  constexpr int64_t width = Vec<T>::size();
  // As ATen's loops do: of a reduced type single numbers have other bits.
  constexpr int64_t body = is_reduced<T> ? 2 * width : width;
  // The guards know that they don't overlap; loads of the next vectors then needn't wait for stores.
  T* const __restrict__ param = reinterpret_cast<T*>(slice.param);
  T* const __restrict__ grad = reinterpret_cast<T*>(slice.grad);
  T* const __restrict__ buffer = reinterpret_cast<T*>(slice.buffer);
  constexpr bool reads_buffer = momentum == Momentum::later;
  constexpr bool writes_buffer = momentum != Momentum::none;

  const int64_t vectors = slice.n - slice.n % body;
  int64_t i = 0;
#pragma GCC unroll 4
  for (; i < vectors; i += width) {
    V p = L::load_elementwise(param + i);
    V g = L::load_elementwise(grad + i);
    V b = reads_buffer ? L::load_elementwise(buffer + i) : g;
    sgd_update<decay, momentum, nesterov>(scalars, p, g, b);
    L::store_elementwise(p, param + i);
    if constexpr (writes_buffer) {
      L::store_elementwise(b, buffer + i);
    }
    if constexpr (stores_grad) {
      L::store_elementwise(g, grad + i);
    }
  }
  for (; i < slice.n; ++i) {
    T g = grad[i];
    T b = reads_buffer ? buffer[i] : g;
    sgd_update<decay, momentum, nesterov>(scalars, param[i], g, b);
    if constexpr (writes_buffer) {
      buffer[i] = b;
    }
    if constexpr (stores_grad) {
      grad[i] = g;
    }
  }
}

template <class T, Momentum momentum>
void choose_nesterov(const SgdHyper& hyper, const SgdScalars<T>& scalars, const SgdSlice& slice) {
  if (writes_grad(hyper)) {
    run<T, false, momentum, true, true>(scalars, slice);
  } else if (hyper.nesterov) {
    hyper.decay ? run<T, true, momentum, true>(scalars, slice) : run<T, false, momentum, true>(scalars, slice);
  } else {
    hyper.decay ? run<T, true, momentum, false>(scalars, slice) : run<T, false, momentum, false>(scalars, slice);
  }
}

template <class T>
void choose(const SgdHyper& hyper, const SgdSlice& slice) {
  const auto& numbers = [&]() -> const auto& {
    if constexpr (std::is_same_v<T, double>) {
      return hyper.doubles;
    } else {
      return hyper.floats;
    }
  }();
  const auto momentum = static_cast<T>(numbers.momentum);
  const SgdScalars<T> scalars{
      static_cast<T>(numbers.weight_decay),
      slice.rounds_momentum ? static_cast<Opmath<T>>(momentum) : numbers.momentum,
      momentum,
      static_cast<T>(numbers.one_minus_dampening),
      static_cast<T>(numbers.minus_lr),
      hyper.maximize};
  if (hyper.has_momentum) {
    slice.first ? choose_nesterov<T, Momentum::first>(hyper, scalars, slice)
                : choose_nesterov<T, Momentum::later>(hyper, scalars, slice);
  } else {
    hyper.decay ? run<T, true, Momentum::none, false>(scalars, slice)
                : run<T, false, Momentum::none, false>(scalars, slice);
  }
}

void kernel(const SgdHyper& hyper, const SgdSlice& slice) {
  switch (slice.dtype) {
    case c10::ScalarType::Double:
      return choose<double>(hyper, slice);
    case c10::ScalarType::BFloat16:
      return choose<c10::BFloat16>(hyper, slice);
    case c10::ScalarType::Half:
      return choose<c10::Half>(hyper, slice);
    default:  // the guards let no other pass
      return choose<float>(hyper, slice);
  }
}

}  // namespace

SgdKernel sgd_kernel() {
  return kernel;
}

}  // namespace fastpatch::CPU_CAPABILITY
