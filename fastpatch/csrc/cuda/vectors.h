// Loads and stores of a thread: 16 bytes at once where memory is aligned for that, single elements elsewhere and at the
// end of a row.
#pragma once

#include <cstdint>

#include "../formulas/device.h"

namespace fastpatch::cuda {

constexpr int vector_bytes = 16;

template <class T>
constexpr int vector_width = vector_bytes / static_cast<int>(sizeof(T));

inline bool is_aligned(const void* memory, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(memory) % static_cast<uintptr_t>(bytes) == 0;
}

template <class T, int width>
struct alignas(sizeof(T) * width) Pack {
  T elements[width];
};

// Elements [begin, begin + width) of a row of n; zeros beyond its end.
template <int width, class T, class Number>
FASTPATCH_DEVICE void load(Number (&numbers)[width], const T* row, int64_t begin, int64_t n, bool aligned) {
  if (aligned && begin + width <= n) {
    const auto pack = *reinterpret_cast<const Pack<T, width>*>(row + begin);
#pragma unroll
    for (int i = 0; i < width; ++i) {
      numbers[i] = static_cast<Number>(pack.elements[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < width; ++i) {
      numbers[i] = begin + i < n ? static_cast<Number>(row[begin + i]) : Number(0);
    }
  }
}

template <int width, class T, class Number>
FASTPATCH_DEVICE void store(T* row, const Number (&numbers)[width], int64_t begin, int64_t n, bool aligned) {
  if (aligned && begin + width <= n) {
    Pack<T, width> pack;
#pragma unroll
    for (int i = 0; i < width; ++i) {
      pack.elements[i] = static_cast<T>(numbers[i]);
    }
    *reinterpret_cast<Pack<T, width>*>(row + begin) = pack;
  } else {
#pragma unroll
    for (int i = 0; i < width; ++i) {
      if (begin + i < n) {
        row[begin + i] = static_cast<T>(numbers[i]);
      }
    }
  }
}

}  // namespace fastpatch::cuda
