// What the two patch points of SGD share.
#pragma once

#include "../entry.h"
#include "../sgd.h"
#include "optimizer.h"

#include <vector>

namespace fastpatch {

extern Target sgd_target;

// The mode and state of this thread, and who compiles its frames: the step reaches nothing of ours where they refuse
// it.
Reason check_surroundings(Asked* asked);

// What explain() tells of a step.
PyObject* explained(const Refusal& refusal, const Asked& asked);

// Counts items[begin, end), which were updated.
void count_updates(Switch state, const std::vector<SgdItem>& items, size_t begin, size_t end);

}  // namespace fastpatch
