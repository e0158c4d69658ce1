// The order in which ATen's sum kernel (native/cpu/SumKernel.cpp) adds a contiguous row, fed by a callable instead of
// memory, so that a sum of computed values needs no temporary.
//
// Values are taken in rows of four accumulators. Each accumulator is a cascade of four levels: level k is emptied into
// level k+1 whenever the row count reaches a multiple of step^(k+1), step being 2^max(4, ceil(log2(rows)) / 4). This
// keeps the addends of like size, and any other order gives other bits.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "../formulas/lanes.h"

namespace fastpatch::CPU_CAPABILITY {

constexpr int cascade_lanes = 4;
constexpr int cascade_levels = 4;

inline int64_t ceil_log2(int64_t n) {
  return n <= 2 ? 1 : 64 - __builtin_clzll(static_cast<unsigned long long>(n - 1));
}

// Sum of `size` addends of type V (a number or a vector of them). four(i, out) gives those from i to i + 3, one(i) the
// i-th; they are asked for once each, in order.
template <class V, class Four, class One>
V cascade_sum(int64_t size, const V& zero, const Four& four, const One& one) {
  const int64_t rows = size / cascade_lanes;
  const int64_t power = std::max<int64_t>(4, ceil_log2(rows) / cascade_levels);
  const int64_t step = int64_t{1} << power;

  V level[cascade_levels][cascade_lanes];
  for (auto& lanes : level) {
    std::fill_n(lanes, cascade_lanes, zero);
  }
  const auto add_rows = [&](int64_t begin, int64_t end) {
    V a = level[0][0], b = level[0][1], c = level[0][2], d = level[0][3];
    for (int64_t row = begin; row < end; ++row) {
      V values[cascade_lanes];
      four(row * cascade_lanes, values);
      a = a + values[0];
      b = b + values[1];
      c = c + values[2];
      d = d + values[3];
    }
    level[0][0] = a, level[0][1] = b, level[0][2] = c, level[0][3] = d;
  };

  int64_t row = 0;
  while (row + step <= rows) {
    add_rows(row, row + step);
    row += step;
    for (int k = 1; k < cascade_levels; ++k) {
      for (int lane = 0; lane < cascade_lanes; ++lane) {
        level[k][lane] = level[k][lane] + level[k - 1][lane];
        level[k - 1][lane] = zero;
      }
      if ((row & ((step - 1) << (k * power))) != 0) {
        break;
      }
    }
  }
  add_rows(row, rows);

  for (int k = 1; k < cascade_levels; ++k) {
    for (int lane = 0; lane < cascade_lanes; ++lane) {
      level[0][lane] = level[0][lane] + level[k][lane];
    }
  }
  V total = level[0][0];
  for (int64_t i = rows * cascade_lanes; i < size; ++i) {
    total = total + one(i);
  }
  for (int lane = 1; lane < cascade_lanes; ++lane) {
    total = total + level[0][lane];
  }
  return total;
}

// A row of elements of T as ATen adds it up: in T itself, or in float32 if T is a reduced type, of which a vector is
// first folded in two.
template <class T>
struct Whole {
  using Sum = std::conditional_t<is_reduced<T>, float, T>;
  static constexpr int64_t width = Vec<T>::size();  // elements an addend

  template <class Values>
  static void four(const Values& values, int64_t i, Vec<Sum>* out) {
    const auto lanes = values.template vectors<4>(i);
    for (int k = 0; k < 4; ++k) {
      out[k] = fold(lanes[k]);
    }
  }

  template <class Values>
  static Vec<Sum> one(const Values& values, int64_t i) {
    return fold(values.template vectors<1>(i)[0]);
  }

 private:
  static Vec<Sum> fold(const Vec<T>& vector) {
    return vector;
  }
  template <Rounding rounding>
  static Vec<Sum> fold(const Pair<T, rounding>& pair) {
    const auto rounded = pair.rounded_if(Rounding::last);
    return rounded.low + rounded.high;
  }
};

// A row of a reduced type T as ATen adds it up after it was cast to float32, as for a mean.
template <class T>
struct CastToFloat {
  using Sum = float;
  static constexpr int64_t width = Vec<float>::size();

  template <class Values>
  static void four(const Values& values, int64_t i, Vec<float>* out) {
    const auto pairs = values.template vectors<2>(i);
    for (int k = 0; k < 2; ++k) {
      const auto rounded = pairs[k].rounded_if(Rounding::last);
      out[2 * k] = rounded.low;
      out[2 * k + 1] = rounded.high;
    }
  }

  template <class Values>
  static Vec<float> one(const Values& values, int64_t i) {
    float numbers[width];
    for (int64_t k = 0; k < width; ++k) {
      numbers[k] = static_cast<float>(values.number(i + k));
    }
    return Vec<float>::loadu(numbers);
  }
};

// Sum of n elements. values.number(i) gives the i-th, values.vectors<count>(i) an array of the `count` vectors from it
// on.
template <class Order, class Values>
typename Order::Sum cascade_row_sum(int64_t n, const Values& values) {
  using Sum = typename Order::Sum;
  constexpr int64_t width = Order::width;
  const auto number = [&](int64_t i) { return static_cast<Sum>(values.number(i)); };
  if (n < width) {
    const auto four = [&](int64_t i, Sum* out) {
      for (int k = 0; k < 4; ++k) {
        out[k] = number(i + k);
      }
    };
    return Sum(0) + cascade_sum<Sum>(n, Sum(0), four, number);
  }
  const int64_t addends = n / width;
  const Vec<Sum> lanes = cascade_sum<Vec<Sum>>(
      addends,
      Vec<Sum>(Sum(0)),
      [&](int64_t i, Vec<Sum>* out) { Order::four(values, i * width, out); },
      [&](int64_t i) { return Order::one(values, i * width); });
  Sum total = 0;
  for (int64_t i = addends * width; i < n; ++i) {
    total += number(i);
  }
  Sum parts[Vec<Sum>::size()];
  lanes.store(parts);
  for (const Sum part : parts) {
    total += part;
  }
  return Sum(0) + total;  // stock adds to an output that it filled with zero
}

// Elements in memory.
template <class T>
struct InMemory {
  const T* data;

  T number(int64_t i) const {
    return data[i];
  }
  template <int count>
  auto vectors(int64_t i) const {
    using V = LanesOf<T, Rounding::each>;
    std::array<V, count> lanes;
    for (int k = 0; k < count; ++k) {
      lanes[k] = Lanes<V>::load(data + i + k * Vec<T>::size());
    }
    return lanes;
  }
};

}  // namespace fastpatch::CPU_CAPABILITY
