#include "empty_tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_ops.h>
#include <ATen/ops/empty_strided_ops.h>

namespace fastpatch {

// Of the CPU, ATen's own functions are called past the dispatcher.

at::Tensor empty_on(const at::Tensor& like, at::IntArrayRef sizes, at::ScalarType dtype, at::MemoryFormat format) {
  if (like.is_cpu()) {
    return at::Tensor(at::detail::empty_cpu(sizes, dtype, /*pin_memory=*/false, format));
  }
  return at::_ops::empty_memory_format::call(
      c10::fromIntArrayRefSlow(sizes), dtype, at::kStrided, like.device(), /*pin_memory=*/false, format);
}

at::Tensor empty_strided_like(const at::Tensor& like, at::ScalarType dtype) {
  if (like.is_cpu()) {
    return at::Tensor(at::detail::empty_strided_cpu(like.sizes(), like.strides(), dtype));
  }
  return at::_ops::empty_strided::call(
      c10::fromIntArrayRefSlow(like.sizes()),
      c10::fromIntArrayRefSlow(like.strides()),
      dtype,
      at::kStrided,
      like.device(),
      /*pin_memory=*/false);
}

at::Tensor empty_elementwise(const at::Tensor& a, const at::Tensor& b) {
  for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
    if (a.is_contiguous(format) && b.is_contiguous(format)) {
      return empty_on(a, a.sizes(), a.scalar_type(), format);
    }
  }
  return empty_strided_like(a, a.scalar_type());
}

}  // namespace fastpatch
