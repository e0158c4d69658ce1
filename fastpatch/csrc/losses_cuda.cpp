// The losses on CUDA devices: which calls are served there, and the tensors around the launches.
#include <limits>

#include <ATen/core/Reduction.h>

#include "empty_tensors.h"
#include "losses.h"
#include "observe.h"

namespace fastpatch {
namespace {

// Element-wise values of contiguous operands. Stock's Huber loss takes the input's strides, also where those of a
// dimension of size 1 are odd.
at::Tensor empty_values(const LossCall& call) {
  const at::Tensor& input = *call.input;
  return loss_of(call.name).output == LossOutput::like_input ? empty_strided_like(input, call.dtype)
                                                             : empty_on(input, input.sizes(), call.dtype);
}

cuda::LossRows rows_of(const at::Tensor& input, const at::Tensor& target, at::ScalarType dtype, double threshold) {
  return {
      static_cast<int>(input.device().index()),
      input.const_data_ptr(),
      target.const_data_ptr(),
      input.scalar_type(),
      target.scalar_type(),
      dtype,
      input.numel(),
      threshold};
}

cuda::LossKernels forward_kernels(const LossCall& call) {
  return call.threshold == 0 ? cuda::l1_loss_kernels() : loss_of(call.name).cuda;
}

// Half of it is exact: stock's kernels of different releases round it or don't.
bool is_half_exact(const LossCall& call) {
  return call.dtype != at::kHalf || static_cast<float>(static_cast<at::Half>(call.threshold)) >=
                                        2 * static_cast<float>(std::numeric_limits<at::Half>::min());
}

}  // namespace

CudaProofs& cuda_proofs_of(LossName name) {
  static CudaProofs proofs[] = {
#define FASTPATCH_PROOFS(...) CudaProofs(cuda::l1_loss_kernels != nullptr),
      FASTPATCH_LOSSES(FASTPATCH_PROOFS)
#undef FASTPATCH_PROOFS
  };
  return proofs[static_cast<size_t>(name)];
}

Reason check_loss_on_cuda(LossCall* call) {
  const at::Tensor& input = *call->input;
  const at::Tensor& target = *call->target;
  if (call->threshold != 0 && !is_half_exact(*call)) {
    return loss_of(call->name).bad_threshold;
  }
  call->asked.ask(LossGuard::order);
  // One loop over memory visits the elements pairwise; of single values stock derives the layout from both operands.
  const bool values = call->reduction == at::Reduction::None;
  if (!in_same_order(input, target) || (values && !(input.is_contiguous() && target.is_contiguous()))) {
    return Reason::strides;
  }
  call->asked.ask(LossGuard::memory);
  const Reason reason = check_storage(input, target);
  if (reason != Reason::served) {
    return reason;
  }
  call->asked.ask(LossGuard::cuda);
  const CudaProofs& proofs = cuda_proofs_of(call->name);
  const Reason of_input = proofs.check(input);
  return of_input == Reason::served ? proofs.check(target) : of_input;
}

at::Tensor loss_value_on_cuda(const LossCall& call) {
  const at::Tensor& input = *call.input;
  const cuda::LossRows rows = rows_of(input, *call.target, call.dtype, call.threshold);
  if (call.reduction == at::Reduction::None) {
    at::Tensor output = empty_values(call);
    if (rows.n > 0) {
      forward_kernels(call).values(rows, output.mutable_data_ptr());
    }
    return output;
  }
  const int64_t blocks = cuda::blocks_of_sum(rows.n);
  at::Tensor output = empty_on(input, {}, call.dtype);
  // Its memory goes back to the allocator before the kernels have run: whoever gets it on this stream comes after them.
  at::Tensor partials;
  if (blocks > 1) {
    partials = empty_on(input, {blocks}, call.dtype == at::kDouble ? at::kDouble : at::kFloat);
  }
  forward_kernels(call).reduced(
      rows,
      call.reduction == at::Reduction::Mean,
      blocks > 1 ? partials.mutable_data_ptr() : nullptr,
      output.mutable_data_ptr());
  return output;
}

bool is_gradient_served_on_cuda(const LossGradientCall& call) {
  const at::Tensor& grad = *call.grad_output;
  const at::Tensor& input = *call.input;
  // Of mixed types stock computes in that of the gradient's tensor.
  for (const at::Tensor* tensor : {&grad, call.target}) {
    if (tensor->device() != input.device() || tensor->scalar_type() != input.scalar_type()) {
      return false;
    }
  }
  return cuda_proofs_of(call.name).check(input) == Reason::served;
}

at::Tensor loss_gradient_on_cuda(const LossGradientCall& call, bool one_grad_output) {
  const at::Tensor& input = *call.input;
  at::Tensor result = empty_on(input, input.sizes(), input.scalar_type());
  loss_of(call.name).cuda.gradient(
      rows_of(input, *call.target, input.scalar_type(), call.threshold),
      call.grad_output->const_data_ptr(),
      one_grad_output,
      call.reduction == at::Reduction::Mean,
      result.mutable_data_ptr());
  return result;
}

}  // namespace fastpatch
