// What the two patch points of SGD share.
#pragma once

#include "../entry.h"
#include "../sgd.h"

#include <vector>

namespace fastpatch {

extern Target sgd_target;

// Counts items[begin, end), which were updated.
void count_updates(Switch state, const std::vector<SgdItem>& items, size_t begin, size_t end);

}  // namespace fastpatch
