// Memory of large results. Fresh memory from the system costs more in page faults than our arithmetic, so it is asked
// for in huge pages, and what a result leaves behind is kept for the next one of the same size.
//
// What is kept is bounded twice: by most_kept, and together with what is in use by the most that was ever in use at
// once, so that keeping never needs more memory than not keeping had needed at its peak.
#pragma once

#include <ATen/core/Tensor.h>

namespace fastpatch {

constexpr int64_t most_kept = int64_t{128} << 20;  // bytes

// As at::empty and at::empty_strided on the CPU.
at::Tensor empty_result(at::IntArrayRef sizes, at::ScalarType dtype);
at::Tensor empty_result(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);

// Is memory kept at all? If not, what is kept now goes back to the system, and later results' memory when they end.
void keep_result_memory(bool keep);

// Bytes kept, not in use by any tensor.
int64_t kept_result_memory();

}  // namespace fastpatch
