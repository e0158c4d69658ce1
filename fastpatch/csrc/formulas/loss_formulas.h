// The formulas of losses: X(loss, formula)
#pragma once

#define FASTPATCH_LOSS_FORMULAS(X) \
  X(smooth_l1_loss, SmoothL1Loss)  \
  X(huber_loss, HuberLoss)         \
  X(l1_loss, L1Loss)
