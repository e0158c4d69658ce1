// The SGD update on CUDA devices. Weak: without CUDA kernels in the library its address is null.
#pragma once

#include "../formulas/sgd_request.h"

namespace fastpatch::cuda {

// Updates n slices, all on CUDA devices, on the streams that are current there. `independent`: none writes what another
// one reads or writes; otherwise they are updated in their order. Doesn't wait for the devices, allocates nothing.
__attribute__((weak)) void sgd(const SgdHyper& hyper, const SgdSlice* slices, int64_t n, bool independent);

}  // namespace fastpatch::cuda
