// The order in which ATen's sum kernel (native/cpu/SumKernel.cpp) adds a contiguous row of floats, fed by a callable
// instead of memory, so that a sum of computed values needs no temporary.
//
// Values are taken in rows of four accumulators. Each accumulator is a cascade of four levels: level k is emptied into
// level k+1 whenever the row count reaches a multiple of step^(k+1), step being 2^max(4, ceil(log2(rows)) / 4). This
// keeps the addends of like size, and any other order gives other bits.
#pragma once

#include <algorithm>
#include <cstdint>

#include <ATen/cpu/vec/vec.h>

namespace fastpatch::CPU_CAPABILITY {

constexpr int cascade_lanes = 4;
constexpr int cascade_levels = 4;

inline int64_t ceil_log2(int64_t n) {
  return n <= 2 ? 1 : 64 - __builtin_clzll(static_cast<unsigned long long>(n - 1));
}

// Sum of `size` values of type V (a float or a vector of them); value(i) gives the i-th.
template <class V, class Value>
V cascade_sum(int64_t size, const Value& value) {
  const int64_t rows = size / cascade_lanes;
  const int64_t power = std::max<int64_t>(4, ceil_log2(rows) / cascade_levels);
  const int64_t step = int64_t{1} << power;

  V level[cascade_levels][cascade_lanes];
  for (auto& lanes : level) {
    std::fill_n(lanes, cascade_lanes, V(0.0f));
  }
  const auto add_rows = [&](int64_t begin, int64_t end) {
    V a = level[0][0], b = level[0][1], c = level[0][2], d = level[0][3];
    for (int64_t row = begin; row < end; ++row) {
      const int64_t i = row * cascade_lanes;
      a = a + value(i);
      b = b + value(i + 1);
      c = c + value(i + 2);
      d = d + value(i + 3);
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
        level[k - 1][lane] = V(0.0f);
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
    total = total + value(i);
  }
  for (int lane = 1; lane < cascade_lanes; ++lane) {
    total = total + level[0][lane];
  }
  return total;
}

// Sum of a contiguous row of n computed floats; scalar(i) gives the i-th, vector(i) those from i on.
template <class Scalar, class Vector>
float cascade_row_sum(int64_t n, const Scalar& scalar, const Vector& vector) {
  using Vec = at::vec::Vectorized<float>;
  constexpr int64_t width = Vec::size();
  if (n < width) {
    return 0.0f + cascade_sum<float>(n, scalar);
  }
  const int64_t vectors = n / width;
  const Vec lanes = cascade_sum<Vec>(vectors, [&](int64_t i) { return vector(i * width); });
  float total = 0.0f;
  for (int64_t i = vectors * width; i < n; ++i) {
    total += scalar(i);
  }
  float parts[width];
  lanes.store(parts);
  for (int64_t k = 0; k < width; ++k) {
    total += parts[k];
  }
  return 0.0f + total;  // stock adds to an output that it filled with zero
}

// Sum of the partial sums that threads leave behind: a row in memory.
inline float cascade_row_sum(const float* values, int64_t n) {
  return cascade_row_sum(
      n,
      [=](int64_t i) { return values[i]; },
      [=](int64_t i) { return at::vec::Vectorized<float>::loadu(values + i); });
}

}  // namespace fastpatch::CPU_CAPABILITY
