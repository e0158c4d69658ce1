// Is a thread in plain eager code?
#pragma once

#include "reasons.h"

namespace fastpatch {

// By its dispatch keys. Autocast is ignored: it casts nothing for float32 operands.
Reason check_thread();

// Will a __torch_function__ mode (`with torch.device(...)`, ...) take the next call of a torch function?
bool in_torch_function_mode();

}  // namespace fastpatch
