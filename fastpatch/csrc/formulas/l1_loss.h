// L1: |input - target|, which stock takes for smooth L1 where beta is zero. Reduced types are rounded after each
// operation.
#pragma once

#include <cmath>

#ifdef CPU_CAPABILITY

#include "lanes.h"

namespace fastpatch::CPU_CAPABILITY {

struct L1Loss {
  template <class T>
  class Value {
   public:
    using V = LanesOf<T, Rounding::each>;

    explicit Value(double /*threshold*/) {}

    T operator()(T input, T target) const {
      return std::abs(input - target);
    }

    C10_ALWAYS_INLINE V operator()(const V& input, const V& target) const {
      return (input - target).abs();
    }
  };
};

}  // namespace fastpatch::CPU_CAPABILITY

#else

#include "device.h"

namespace fastpatch::cuda {

template <class T>
struct L1Loss {
  using Number = Opmath<T>;

  L1Loss(double /*threshold*/, double /*norm*/) {}

  FASTPATCH_DEVICE Number value(Number input, Number target) const {
    return magnitude(rounded<T>(difference(input, target)));
  }
};

}  // namespace fastpatch::cuda

#endif
