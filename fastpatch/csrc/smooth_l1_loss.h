// Smooth L1 over tensors: guard, kernel, autograd.
#pragma once

#include <typeinfo>

#include "guards.h"

namespace fastpatch {

struct SmoothL1LossCall {
  const at::Tensor* input;
  const at::Tensor* target;
  int64_t reduction;  // at::Reduction
  double beta;
};

Reason check_smooth_l1_loss(const SmoothL1LossCall& call);

// The call must have passed the check.
at::Tensor smooth_l1_loss(const SmoothL1LossCall& call);

// The type of our autograd node.
const std::type_info& smooth_l1_loss_node();

}  // namespace fastpatch
