// Is a thread in plain eager code?
#pragma once

#include "reasons.h"

namespace fastpatch {

// Autocast is ignored: it casts nothing for float32 operands.
Reason check_thread();

}  // namespace fastpatch
