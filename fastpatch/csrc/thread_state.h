// Is a thread in plain eager code?
#pragma once

#include "reasons.h"

namespace fastpatch {

// By its dispatch keys, of which those of autocast are ignored.
Reason check_thread();

// Does autocast cast what CPU operators are given?
bool is_autocasting();

// Will a __torch_function__ mode (`with torch.device(...)`, ...) take the next call of a torch function?
bool in_torch_function_mode();

}  // namespace fastpatch
