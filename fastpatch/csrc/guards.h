// May this call be served? Guards over tensors and the thread; each answers with a Reason.
#pragma once

#include <ATen/core/Tensor.h>

#include "reasons.h"
#include "thread_state.h"

namespace fastpatch {

// Is this a strided, unwrapped CPU tensor? The dispatch keys answer for device, layout,
// negation, subclasses, functorch and inference at once; only a refusal looks at them one by one.
Reason check_tensor(const at::Tensor& tensor);

// The same for a tensor on the CPU or a CUDA device. Whether that device serves is asked of a target's CudaProofs.
Reason check_tensor_anywhere(const at::Tensor& tensor);

// What these may answer, for the tables of guards.
#define FASTPATCH_TENSOR_REASONS subclass, functorch, layout, device, lazy_negation, inference_tensor, dispatch_state

// The same, and that its dtype is one we compute in: float32, float64, bfloat16, float16.
Reason check_floating_anywhere(const at::Tensor& tensor);
#define FASTPATCH_FLOATING_REASONS FASTPATCH_TENSOR_REASONS, complex, dtype

// Do two tensors of one shape hold their elements in the same order, without gaps? Then one loop over memory visits
// them pairwise.
bool in_same_order(const at::Tensor& a, const at::Tensor& b);

// Are two tensors within their storages?
Reason check_storage(const at::Tensor& a, const at::Tensor& b);

// Both of the above. The strides of dimensions of size 1 say nothing about the order, but PyTorch derives those of a
// result from them: `exact` compares them too.
Reason check_memory(const at::Tensor& a, const at::Tensor& b, bool exact);

}  // namespace fastpatch
