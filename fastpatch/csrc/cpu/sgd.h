// Loops over raw memory for SGD, one set for each CPU capability.
#pragma once

#include "../formulas/sgd_request.h"

namespace fastpatch {

// One call covers what stock gives one thread, or a multiple of sgd_unit elements of it: the last elements of a reduced
// type, less than that many, follow another formula.
constexpr int64_t sgd_unit = 64;
using SgdKernel = void (*)(const SgdHyper& hyper, const SgdSlice& slice);

namespace DEFAULT {
SgdKernel sgd_kernel();
}
namespace AVX2 {
SgdKernel sgd_kernel();
}
namespace AVX512 {
SgdKernel sgd_kernel();
}

}  // namespace fastpatch
