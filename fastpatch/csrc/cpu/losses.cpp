// All losses in one file: at::vec takes longer to read than they take to compile.
#include "../formulas/huber_loss.h"
#include "../formulas/l1_loss.h"
#include "../formulas/smooth_l1_loss.h"
#include "loss_loops.h"

namespace fastpatch::CPU_CAPABILITY {

#define FASTPATCH_KERNELS(name, Formula) \
  LossKernels name##_kernels() {         \
    return loss_kernels<Formula>();      \
  }
FASTPATCH_LOSS_FORMULAS(FASTPATCH_KERNELS)
#undef FASTPATCH_KERNELS

}  // namespace fastpatch::CPU_CAPABILITY
