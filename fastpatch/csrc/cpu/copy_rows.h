// Copies rows of numbers and converts their type, one function for each CPU capability.
#pragma once

#include <cstdint>

#include <c10/core/ScalarType.h>

namespace fastpatch {

// Numbers in memory: rows of columns, with strides in numbers.
struct Rows {
  const void* data;
  c10::ScalarType type;
  int64_t column_stride;
  int64_t row_stride;
};

// out, without gaps, = columns of rows. Types: equal ones, or one of them float32 and the other a reduced type, or
// whole numbers to any floating-point type.
using CopyRows = void (*)(void* out, c10::ScalarType out_type, const Rows& in, int64_t columns, int64_t rows);

namespace DEFAULT {
CopyRows copy_rows();
}
namespace AVX2 {
CopyRows copy_rows();
}
namespace AVX512 {
CopyRows copy_rows();
}

}  // namespace fastpatch
