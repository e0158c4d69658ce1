#include "copy_rows.h"

#include <algorithm>

#include "../formulas/lanes.h"

namespace fastpatch::CPU_CAPABILITY {
namespace {

// A row without gaps, which stock converts with the same bits.
template <class Out, class In>
void copy_dense(Out* out, const In* in, int64_t n) {
  int64_t i = 0;
  if constexpr (!std::is_same_v<Out, In> && !std::is_integral_v<In>) {
    using Reduced = std::conditional_t<is_reduced<In>, In, Out>;
    using V = Pair<Reduced, Rounding::last>;
    constexpr int64_t width = Vec<float>::size();
    for (; i + 2 * width <= n; i += 2 * width) {
      if constexpr (is_reduced<In>) {
        const V pair = Lanes<V>::load(in + i);
        pair.low.store(out + i);
        pair.high.store(out + i + width);
      } else {
        Lanes<V>::store({Vec<float>::loadu(in + i), Vec<float>::loadu(in + i + width)}, out + i);
      }
    }
  }
  for (; i < n; ++i) {
    out[i] = static_cast<Out>(in[i]);
  }
}

template <class Out, class In>
void copy(void* to, const Rows& from, int64_t columns, int64_t rows) {
  Out* out = static_cast<Out*>(to);
  const In* in = static_cast<const In*>(from.data);
  const int64_t stride = from.column_stride;
  for (int64_t row = 0; row < rows; ++row, out += columns, in += from.row_stride) {
    if (stride == 1) {
      copy_dense(out, in, columns);
    } else if (stride == 0) {
      std::fill_n(out, columns, static_cast<Out>(*in));
    } else {
      for (int64_t i = 0; i < columns; ++i) {
        out[i] = static_cast<Out>(in[i * stride]);
      }
    }
  }
}

// From floating-point types: T itself, or float32 to or from a reduced type.
template <class T>
void choose(void* out, c10::ScalarType out_type, const Rows& in, int64_t columns, int64_t rows) {
  if (out_type == in.type) {
    copy<T, T>(out, in, columns, rows);
  } else if (out_type == c10::ScalarType::Float) {
    copy<float, T>(out, in, columns, rows);
  } else {
    copy<T, float>(out, in, columns, rows);
  }
}

template <class T>
bool copy_integers(void* out, const Rows& in, int64_t columns, int64_t rows) {
  switch (in.type) {
#define FASTPATCH_COPY(type, name)         \
  case c10::ScalarType::name:              \
    copy<T, type>(out, in, columns, rows); \
    return true;
    AT_FORALL_INT_TYPES(FASTPATCH_COPY)
#undef FASTPATCH_COPY
    default:
      return false;
  }
}

void run(void* out, c10::ScalarType out_type, const Rows& in, int64_t columns, int64_t rows) {
  const bool done = [&] {
    switch (out_type) {
      case c10::ScalarType::BFloat16:
        return copy_integers<c10::BFloat16>(out, in, columns, rows);
      case c10::ScalarType::Half:
        return copy_integers<c10::Half>(out, in, columns, rows);
      case c10::ScalarType::Double:
        return copy_integers<double>(out, in, columns, rows);
      default:
        return copy_integers<float>(out, in, columns, rows);
    }
  }();
  if (done) {
    return;
  }
  // Anything else would write beyond a block.
  TORCH_INTERNAL_ASSERT((out_type == c10::ScalarType::Double) == (in.type == c10::ScalarType::Double));
  switch (out_type == c10::ScalarType::Float ? in.type : out_type) {
    case c10::ScalarType::BFloat16:
      return choose<c10::BFloat16>(out, out_type, in, columns, rows);
    case c10::ScalarType::Half:
      return choose<c10::Half>(out, out_type, in, columns, rows);
    case c10::ScalarType::Double:
      return copy<double, double>(out, in, columns, rows);
    default:
      return copy<float, float>(out, in, columns, rows);
  }
}

}  // namespace

CopyRows copy_rows() {
  return run;
}

}  // namespace fastpatch::CPU_CAPABILITY
