// What an SGD step is asked.
#pragma once

#include "asked.h"
#include "guards.h"

namespace fastpatch {

// X(guard, question, reasons): in the order in which they are asked; `hyperparameters` to `foreach_order` of each group
// in turn, `param_kind` to `cuda` of each of its parameters.
#define FASTPATCH_SGD_GUARDS(X)                                                                                 \
  X(signature, "the function sgd is called as SGD.step calls it", arguments, optimizer)                         \
  X(mode, "no __torch_function__ mode is active", torch_function)                                               \
  X(thread, "this thread runs plain eager code", FASTPATCH_THREAD_REASONS)                                      \
  X(eager, "torch.compile doesn't take the step", compiling)                                                    \
  X(scaling, "no GradScaler takes part in the step", grad_scale)                                                \
  X(recording, "the step itself isn't differentiated", differentiable)                                          \
  X(containers, "groups and state are in the containers SGD makes", optimizer)                                  \
  X(hyperparameters,                                                                                            \
    "the hyperparameters are numbers, and not fused=True",                                                      \
    optimizer,                                                                                                  \
    arguments,                                                                                                  \
    fused,                                                                                                      \
    tensor_hyperparameter,                                                                                      \
    hyperparameter)                                                                                             \
  X(lists, "parameters come in lists as SGD makes them", optimizer, arguments)                                  \
  X(param_kind, "a parameter: torch.Tensor, Parameter or DTensor", torch_function, subclass, arguments)         \
  X(leaf, "without a gradient, it is a leaf", non_leaf)                                                         \
  X(grad_kind, "its gradient is of the same kind", placements, torch_function, subclass, arguments)             \
  X(state, "its state is a dict", optimizer)                                                                    \
  X(buffer_kind, "its momentum buffer is of the same kind", momentum_buffer)                                    \
  X(division, "a DTensor is divided as its gradient and buffer are", placements, subclass)                      \
  X(param_tensor, "it is a plain strided tensor of a served dtype", FASTPATCH_FLOATING_REASONS)                 \
  X(grad_tensor, "so is its gradient", sparse_grad, FASTPATCH_FLOATING_REASONS)                                 \
  X(alike, "both have one device, dtype and shape", device, dtype, shape_mismatch)                              \
  X(order, "both hold their elements in one order, without gaps", strides, storage)                             \
  X(apart, "they share no memory", overlap)                                                                     \
  X(buffer, "its momentum buffer is like it, in memory of its own", momentum_buffer, strides, storage, overlap) \
  X(cuda, "the native library serves its CUDA device", cuda_not_built, cuda_unproven)                           \
  X(precision, "all dtypes of the group can hold the hyperparameters", hyperparameter)                          \
  X(hyper_memory, "the group writes none of its own hyperparameters", tensor_hyperparameter)                    \
  X(foreach_order, "foreach=True: its parameters are alike, in memory apart", foreach)                          \
  X(later_groups, "no group writes hyperparameters of a later one", tensor_hyperparameter)

enum class SgdGuard { FASTPATCH_SGD_GUARDS(FASTPATCH_GUARD_NAME) };

}  // namespace fastpatch
