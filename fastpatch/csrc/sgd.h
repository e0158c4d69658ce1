// One SGD update over the tensors of a parameter group: guard and kernel.
#pragma once

#include "cpu/sgd.h"
#include "guards.h"

#include <vector>

namespace fastpatch {

// A parameter of a group with all that its update touches.
struct SgdItem {
  at::Tensor param;
  at::Tensor grad;
  at::Tensor buffer;  // undefined: no momentum, or its first step (sgd_step() then makes it)
};

// Judges the tensors; the caller has judged their Python objects and the thread.
Reason check_sgd_item(const SgdItem& item);

// Updates items[begin, end) in place, as stock's loop over them would. All must have passed the check.
// May release the GIL, which the caller must hold.
void sgd_step(std::vector<SgdItem>& items, size_t begin, size_t end, const SgdHyper& hyper);

}  // namespace fastpatch
