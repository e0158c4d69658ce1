// Is a thread in plain eager code?
#pragma once

#include "reasons.h"

namespace at {
class Tensor;
}

namespace fastpatch {

// By its dispatch keys, of which those of autocast are ignored.
Reason check_thread();

// What it may answer, for the tables of guards.
#define FASTPATCH_THREAD_REASONS functorch, tracing, dispatch_mode, inference_mode, dispatch_state, forward_ad

// Does autocast cast what operators on the tensor's kind of device are given?
bool is_autocasting(const at::Tensor& tensor);

// Will a __torch_function__ mode (`with torch.device(...)`, ...) take the next call of a torch function?
bool in_torch_function_mode();

}  // namespace fastpatch
