// Uninitialized tensors for results, on the device of another tensor.
#pragma once

#include <ATen/core/Tensor.h>

namespace fastpatch {

at::Tensor empty_on(
    const at::Tensor& like,
    at::IntArrayRef sizes,
    at::ScalarType dtype,
    at::MemoryFormat format = at::MemoryFormat::Contiguous);

// With the sizes and strides of `like`.
at::Tensor empty_strided_like(const at::Tensor& like, at::ScalarType dtype);

// What TensorIterator gives an element-wise result of operands of one dtype that passed check_memory(..., exact=true).
at::Tensor empty_elementwise(const at::Tensor& a, const at::Tensor& b);

}  // namespace fastpatch
