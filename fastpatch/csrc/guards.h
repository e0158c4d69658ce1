// May this call be served? Guards over tensors and the thread; each answers with a Reason.
#pragma once

#include <ATen/core/Tensor.h>

#include "reasons.h"
#include "thread_state.h"

namespace fastpatch {

// Is this a strided, unwrapped, float32 CPU tensor with memory behind it? The dispatch keys answer for device,
// layout, negation, subclasses, functorch and inference at once; only a refusal looks at them one by one.
Reason check_tensor(const at::Tensor& tensor);

// Elements of both in the same order, without gaps: one loop over memory visits them pairwise.
bool same_dense_order(const at::Tensor& a, const at::Tensor& b);

// What TensorIterator gives an element-wise result of operands that are same_dense_order().
at::Tensor empty_elementwise(const at::Tensor& a, const at::Tensor& b);

}  // namespace fastpatch
