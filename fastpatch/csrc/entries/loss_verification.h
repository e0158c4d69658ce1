// What of a loss call is checked against stock.
#pragma once

#include "../verification.h"
#include "loss_call.h"

namespace fastpatch {

// Hands over the operands of a call that passed its check, which has to be made again then. Sets that the gradients are
// to be checked too. False with a Python error set.
bool begin_verification(const LossTarget& target, LossCall* call, Verification* verification);

}  // namespace fastpatch
