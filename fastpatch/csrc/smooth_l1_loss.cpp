#include "smooth_l1_loss.h"

#include <cmath>
#include <limits>

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/native/PointwiseOps.h>
#include <ATen/native/ReduceOps.h>
#include <ATen/ops/smooth_l1_loss_backward.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include "capability.h"
#include "cpu/smooth_l1_loss.h"
#include "grain.h"
#include "observe.h"

namespace fastpatch {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;
using StockNode = torch::autograd::generated::SmoothL1LossBackward0;

// The sum follows the vector width of stock's sum kernel, the gradient that of stock's gradient kernel; the values
// themselves are alike at any width.
const SmoothL1LossKernels& forward_kernels() {
  static const auto kernels = FASTPATCH_CHOOSE(smooth_l1_loss_kernels(), at::native::sum_stub.AVX512 != nullptr);
  return kernels;
}

const SmoothL1LossKernels& backward_kernels() {
  static const auto kernels =
      FASTPATCH_CHOOSE(smooth_l1_loss_kernels(), at::native::smooth_l1_backward_stub.AVX512 != nullptr);
  return kernels;
}

float sum(const float* input, const float* target, int64_t n, float beta) {
  const auto& kernels = forward_kernels();
  const int threads = at::get_num_threads();
  if (n < grain || threads == 1 || at::in_parallel_region()) {
    return kernels.sum(input, target, n, beta);
  }
  c10::SmallVector<float, 64> partials(threads, 0.0f);
  at::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) {
    partials[at::get_thread_num()] = kernels.sum(input + begin, target + begin, end - begin, beta);
  });
  return kernels.sum_partials(partials.data(), threads);
}

at::Tensor compute(const SmoothL1LossCall& call) {
  const float* const input = call.input->const_data_ptr<float>();
  const float* const target = call.target->const_data_ptr<float>();
  const int64_t n = call.input->numel();
  const float beta = static_cast<float>(call.beta);
  if (call.reduction == at::Reduction::None) {
    at::Tensor output = empty_elementwise(*call.input, *call.target);
    float* const values = output.mutable_data_ptr<float>();
    at::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) {
      forward_kernels().values(values + begin, input + begin, target + begin, end - begin, beta);
    });
    return output;
  }
  const float total = sum(input, target, n, beta);
  at::Tensor output(at::detail::empty_cpu({}, at::kFloat));
  *output.mutable_data_ptr<float>() = call.reduction == at::Reduction::Mean ? total / static_cast<float>(n) : total;
  return output;
}

// Stride 0 in every dimension: one value, as the backward of sum() and of mean() hands out.
bool is_one_value(const at::Tensor& tensor) {
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.stride(dim) != 0 && tensor.size(dim) != 1) {
      return false;
    }
  }
  return true;
}

// May our kernel compute this gradient? Only contiguous operands: stock's gradient is always contiguous, and over
// other layouts it runs its scalar formula.
bool serves_gradient(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& target) {
  for (const at::Tensor* tensor : {&grad, &input, &target}) {
    if (check_tensor(*tensor) != Reason::served) {
      return false;
    }
  }
  return check_thread() == Reason::served && input.is_contiguous() && target.is_contiguous() &&
         input.sizes() == target.sizes() && check_memory(input, target, /*exact=*/true) == Reason::served &&
         (grad.dim() == 0 || grad.sizes() == input.sizes()) &&
         (is_one_value(grad) || check_memory(grad, input, /*exact=*/true) == Reason::served);
}

at::Tensor gradient(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& target, int64_t reduction, double beta) {
  const int64_t n = input.numel();
  const float norm = static_cast<float>(reduction == at::Reduction::Mean ? 1.0 / static_cast<double>(n) : 1.0);
  const bool one = is_one_value(grad);
  at::Tensor result(at::detail::empty_cpu(input.sizes(), at::kFloat));
  float* const out = result.mutable_data_ptr<float>();
  const float* const in = input.const_data_ptr<float>();
  const float* const want = target.const_data_ptr<float>();
  const float* const grads = grad.const_data_ptr<float>();
  at::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) {
    backward_kernels().gradient(
        out + begin, in + begin, want + begin, one ? grads : grads + begin, one, end - begin, norm, beta);
  });
  return result;
}

// Stock's node with another way to its result: type, name, saved tensors, double backward, anomaly mode and compiled
// autograd are inherited.
struct SmoothL1LossNode final : public StockNode {
  using StockNode::StockNode;

  variable_list apply(variable_list&& grads) override {
    const bool only_input = task_should_compute_output(0) && !task_should_compute_output(1);
    if (!only_input || at::GradMode::is_enabled() || !grads[0].defined()) {
      return StockNode::apply(std::move(grads));
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    // Once only: a hook on a saved tensor must not run twice.
    const at::Tensor input = self_.unpack();
    const at::Tensor target = target_.unpack();
    if (serves_gradient(grads[0], input, target)) {
      const ObservedRange range("fastpatch::smooth_l1_loss_backward");
      return {gradient(grads[0], input, target, reduction, beta), at::Tensor()};
    }
    return {at::smooth_l1_loss_backward(grads[0], input, target, reduction, beta), at::Tensor()};
  }
};

// Nodes are held by std::shared_ptr in older releases, by c10::intrusive_ptr in newer ones.
using NodePtr = std::decay_t<decltype(torch::autograd::Edge().function)>;

template <class Ptr, class NodeType>
Ptr own_node(NodeType* node) {
  if constexpr (std::is_same_v<Ptr, std::shared_ptr<Node>>) {
    // Found by argument-dependent look-up, where it exists: frees long graphs without recursion.
    return Ptr(node, [](auto* owned) { deleteNode(owned); });
  } else {
    return Ptr::unsafe_steal_from_new(node);
  }
}

}  // namespace

Reason check_smooth_l1_loss(const SmoothL1LossCall& call) {
  Reason reason = check_thread();
  if (reason == Reason::served) {
    reason = check_tensor(*call.input);
  }
  if (reason == Reason::served) {
    reason = check_tensor(*call.target);
  }
  if (reason != Reason::served) {
    return reason;
  }
  if (call.input->sizes() != call.target->sizes()) {
    return Reason::shape_mismatch;
  }
  if (call.input->numel() == 0) {
    return Reason::empty;
  }
  reason = check_memory(*call.input, *call.target, /*exact=*/true);
  if (reason != Reason::served) {
    return reason;
  }
  // Half of beta must be normal too: with denormals flushed to zero its rounding would show.
  constexpr double smallest = 2.0 * std::numeric_limits<float>::min();
  const bool normal = call.beta >= smallest && call.beta <= std::numeric_limits<float>::max();
  return normal ? Reason::served : Reason::beta;
}

at::Tensor smooth_l1_loss(const SmoothL1LossCall& call) {
  const ObservedRange range("fastpatch::smooth_l1_loss");
  if (!at::GradMode::is_enabled() || !(call.input->requires_grad() || call.target->requires_grad())) {
    return compute(call);
  }
  // In stock's order: hooks on saved tensors run before the loss is computed.
  auto* node = new SmoothL1LossNode();
  const NodePtr owner = own_node<NodePtr>(node);
  node->set_next_edges(torch::autograd::collect_next_edges(*call.input, *call.target));
  node->beta = call.beta;
  node->reduction = call.reduction;
  node->self_ = torch::autograd::SavedVariable(*call.input, /*is_output=*/false);
  node->target_ = torch::autograd::SavedVariable(*call.target, /*is_output=*/false);
  at::Tensor output = compute(call);
  torch::autograd::set_history(output, owner);
  return output;
}

const std::type_info& smooth_l1_loss_node() {
  return typeid(SmoothL1LossNode);
}

}  // namespace fastpatch
