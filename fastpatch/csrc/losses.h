// The losses of two tensors, element-wise and then reduced: one line of the table each, and a formula.
#pragma once

#include <typeinfo>

#include "cpu/loss_kernels.h"
#include "cuda/losses.h"
#include "cuda_proofs.h"
#include "guards.h"
#include "loss_guards.h"

namespace fastpatch {

// Where stock's output comes from: TensorIterator, which promotes dtypes and derives strides from both operands, or
// empty_like(input).
enum class LossOutput { iterator, like_input };

// What stock does where the threshold is zero.
enum class ZeroThreshold { l1, raises };

// X(name, autograd node, threshold, stub of the gradient, output, zero, parameters in torch.nn.functional)
#define FASTPATCH_LOSSES(X)                                             \
  X(smooth_l1_loss,                                                     \
    SmoothL1LossBackward0,                                              \
    beta,                                                               \
    smooth_l1_backward_stub,                                            \
    iterator,                                                           \
    l1,                                                                 \
    ("input", "target", "size_average", "reduce", "reduction", "beta")) \
  X(huber_loss,                                                         \
    HuberLossBackward0,                                                 \
    delta,                                                              \
    huber_backward_stub,                                                \
    like_input,                                                         \
    raises,                                                             \
    ("input", "target", "reduction", "delta", "weight"))

struct Loss {
  const char* name;
  const char* range;  // in a profile
  const char* backward_range;
  LossOutput output;
  ZeroThreshold zero;
  Reason bad_threshold;
  LossKernels forward;
  LossKernels backward;    // of the vector width of stock's gradient kernel
  cuda::LossKernels cuda;  // null in a library without them
  at::Tensor (*stock_gradient)(
      const at::Tensor& grad_output,
      const at::Tensor& input,
      const at::Tensor& target,
      int64_t reduction,
      double threshold);
};

enum class LossName {
#define FASTPATCH_NAME(name, ...) name,
  FASTPATCH_LOSSES(FASTPATCH_NAME)
#undef FASTPATCH_NAME
};

const Loss& loss_of(LossName name);

// The gradient of input; that of target is the one with operands exchanged.
struct LossGradientCall {
  LossName name;
  const at::Tensor* grad_output;
  const at::Tensor* input;
  const at::Tensor* target;
  int64_t reduction;
  double threshold;
};

at::Tensor loss_gradient(const LossGradientCall& call);

// Is it ours, or stock's kernel's?
bool is_gradient_served(const LossGradientCall& call);

struct LossCall {
  LossName name;
  const at::Tensor* input;
  const at::Tensor* target;
  int64_t reduction;  // at::Reduction
  double threshold;   // beta or delta; zero for L1
  // What the check finds out: the dtype that stock computes in, which operands it casts to it beforehand and keeps so
  // (autocast), and whether one loop over memory visits the operands pairwise.
  at::ScalarType dtype = at::kFloat;
  bool casts_input = false;
  bool casts_target = false;
  bool same_order = true;
  at::Tensor (*gradient)(const LossGradientCall&) = loss_gradient;  // or what checks it too
  Asked asked;
};

// Completes the call.
Reason check_loss(LossCall* call);

// The call must have passed the check.
at::Tensor loss(const LossCall& call);

// Will autograd record it? Then the GIL must not be held: PyTorch locks a leaf while it waits for the GIL.
bool is_recorded(const at::Tensor& input, const at::Tensor& target);

// The same without autograd.
at::Tensor loss_value(const LossCall& call);

// What of the above is different on CUDA devices; the operands have passed all checks that are the same.
Reason check_loss_on_cuda(LossCall* call);
at::Tensor loss_value_on_cuda(const LossCall& call);
bool is_gradient_served_on_cuda(const LossGradientCall& call);
at::Tensor loss_gradient_on_cuda(const LossGradientCall& call, bool one_grad_output);
CudaProofs& cuda_proofs_of(LossName name);

// The type of the autograd node of a loss.
const std::type_info& loss_node(LossName name);

// loss() where autograd records: in loss_node.cpp, as torch's header for nodes takes long to compile.
at::Tensor recorded_loss(const LossCall& call);

}  // namespace fastpatch
