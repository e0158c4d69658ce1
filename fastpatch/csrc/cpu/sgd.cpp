#include "sgd.h"

#include "../formulas/sgd.h"

namespace fastpatch::CPU_CAPABILITY {
namespace {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t width = Vec::size();

template <bool maximize, bool decay, Momentum momentum, bool nesterov>
void run(const SgdScalars& scalars, const SgdSlice& slice) {
  // The guards know that they don't overlap; loads of the next vectors then needn't wait for stores.
  float* const __restrict__ param = slice.param;
  const float* const __restrict__ grad = slice.grad;
  float* const __restrict__ buffer = slice.buffer;
  constexpr bool reads_buffer = momentum == Momentum::later;
  constexpr bool writes_buffer = momentum != Momentum::none;

  int64_t i = 0;
#pragma GCC unroll 4
  for (; i + width <= slice.n; i += width) {
    Vec p = Vec::loadu(param + i);
    Vec b = reads_buffer ? Vec::loadu(buffer + i) : Vec(0.0f);
    sgd_update<maximize, decay, momentum, nesterov>(scalars, p, Vec::loadu(grad + i), b);
    p.store(param + i);
    if (writes_buffer) {
      b.store(buffer + i);
    }
  }
  for (; i < slice.n; ++i) {
    float b = reads_buffer ? buffer[i] : 0.0f;
    sgd_update<maximize, decay, momentum, nesterov>(scalars, param[i], grad[i], b);
    if (writes_buffer) {
      buffer[i] = b;
    }
  }
}

template <bool maximize, bool decay>
void choose_momentum(const SgdHyper& hyper, const SgdScalars& scalars, const SgdSlice& slice) {
  if (!hyper.has_momentum) {
    run<maximize, decay, Momentum::none, false>(scalars, slice);
  } else if (slice.first) {
    hyper.nesterov ? run<maximize, decay, Momentum::first, true>(scalars, slice)
                   : run<maximize, decay, Momentum::first, false>(scalars, slice);
  } else {
    hyper.nesterov ? run<maximize, decay, Momentum::later, true>(scalars, slice)
                   : run<maximize, decay, Momentum::later, false>(scalars, slice);
  }
}

void kernel(const SgdHyper& hyper, const SgdSlice& slice) {
  const SgdScalars scalars{hyper.weight_decay, hyper.momentum, hyper.one_minus_dampening, hyper.minus_lr};
  if (hyper.maximize) {
    hyper.decay ? choose_momentum<true, true>(hyper, scalars, slice)
                : choose_momentum<true, false>(hyper, scalars, slice);
  } else {
    hyper.decay ? choose_momentum<false, true>(hyper, scalars, slice)
                : choose_momentum<false, false>(hyper, scalars, slice);
  }
}

}  // namespace

SgdKernel sgd_kernel() {
  return kernel;
}

}  // namespace fastpatch::CPU_CAPABILITY
