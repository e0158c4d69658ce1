#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include "losses.h"

namespace fastpatch {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;
namespace generated = torch::autograd::generated;

// Stock's node with another way to its result: type, name, saved tensors, double backward, anomaly mode and compiled
// autograd are inherited.
template <class StockNode, double StockNode::* threshold, LossName loss>
struct LossNode final : public StockNode {
  using StockNode::StockNode;

  variable_list apply(variable_list&& grads) override {
    // With grad mode on the backward is itself recorded.
    if (!grads[0].defined() || at::GradMode::is_enabled()) {
      return StockNode::apply(std::move(grads));
    }
    // Once only: a hook on a saved tensor must not run twice.
    const auto [input, target] = unpack();
    variable_list gradients(2);
    if (this->task_should_compute_output(0)) {
      gradients[0] = gradient(grads[0], input, target);
    }
    if (this->task_should_compute_output(1)) {
      gradients[1] = gradient(grads[0], target, input);
    }
    return gradients;
  }

  at::Tensor (*gradient_of)(const LossGradientCall&) = loss_gradient;

 private:
  std::pair<at::Tensor, at::Tensor> unpack() {
    const std::lock_guard<std::mutex> lock(this->mutex_);
    return {this->self_.unpack(), this->target_.unpack()};
  }

  // Without the lock: a thread that holds the GIL may wait for that, and verifying waits for the GIL.
  at::Tensor gradient(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& target) {
    return gradient_of({loss, &grad, &input, &target, this->reduction, this->*threshold});
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

template <class NodeType, class StockNode>
at::Tensor record(const LossCall& call, double StockNode::* threshold) {
  // What stock casts it saves as the cast, which later changes of the operand don't reach; and gradients of a backward
  // that is itself recorded meet there, in float32. So do ours.
  const at::Tensor input = call.casts_input ? call.input->to(at::kFloat) : *call.input;
  const at::Tensor target = call.casts_target ? call.target->to(at::kFloat) : *call.target;
  // In stock's order: hooks on saved tensors run before the loss is computed.
  auto* node = new NodeType();
  const NodePtr owner = own_node<NodePtr>(node);
  node->set_next_edges(torch::autograd::collect_next_edges(input, target));
  node->*threshold = call.threshold;
  node->reduction = call.reduction;
  node->gradient_of = call.gradient;
  node->self_ = torch::autograd::SavedVariable(input, /*is_output=*/false);
  node->target_ = torch::autograd::SavedVariable(target, /*is_output=*/false);
  LossCall of_saved = call;
  of_saved.input = &input;
  of_saved.target = &target;
  at::Tensor output = loss_value(of_saved);
  torch::autograd::set_history(output, owner);
  return output;
}

#define FASTPATCH_NODE(name, node, threshold, ...) \
  using node##Of = LossNode<generated::node, &generated::node::threshold, LossName::name>;
FASTPATCH_LOSSES(FASTPATCH_NODE)
#undef FASTPATCH_NODE

}  // namespace

at::Tensor recorded_loss(const LossCall& call) {
  switch (call.name) {
#define FASTPATCH_RECORD(name, node, threshold, ...) \
  case LossName::name:                               \
    return record<node##Of>(call, &generated::node::threshold);
    FASTPATCH_LOSSES(FASTPATCH_RECORD)
#undef FASTPATCH_RECORD
  }
  TORCH_INTERNAL_ASSERT(false, "no such loss");
}

const std::type_info& loss_node(LossName name) {
  switch (name) {
#define FASTPATCH_TYPE(name, node, ...) \
  case LossName::name:                  \
    return typeid(node##Of);
    FASTPATCH_LOSSES(FASTPATCH_TYPE)
#undef FASTPATCH_TYPE
  }
  TORCH_INTERNAL_ASSERT(false, "no such loss");
}

}  // namespace fastpatch
