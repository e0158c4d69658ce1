// What of an SGD update is checked against stock.
#pragma once

#include "../verification.h"
#include "optimizer.h"

namespace fastpatch {

// Hands over the tensors of a step whose groups were all read; it has to be read again then. False with a Python error
// set.
bool begin_verification(const OptimizerStep& step, Verification* verification);
bool end_verification(const OptimizerStep& step, Verification* verification);

// The same for items[begin, end) of a call of the function sgd.
bool begin_verification(
    const std::vector<SgdItem>& items,
    Places places,
    const HyperObjects& hyper,
    bool foreach,
    Verification* verification);
bool end_verification(const std::vector<SgdItem>& items, Places places, Verification* verification);

}  // namespace fastpatch
