// What a call of a loss is asked.
#pragma once

#include "asked.h"
#include "guards.h"

namespace fastpatch {

// X(guard, question, reasons): in the order in which they are asked. {threshold} is the name of the parameter.
#define FASTPATCH_LOSS_GUARDS(X)                                                                        \
  X(signature, "the arguments fit the function's parameters", arguments)                                \
  X(weights, "no weight for each element", weight, torch_function, subclass, arguments)                 \
  X(kinds, "input and target: torch.Tensor or torch.nn.Parameter", torch_function, subclass, arguments) \
  X(reduction, "the reduction is named as documented", legacy_arguments, arguments)                     \
  X(threshold, "{threshold} is a number in its range", beta, delta)                                     \
  X(thread, "this thread runs plain eager code", FASTPATCH_THREAD_REASONS)                              \
  X(tensors, "input and target are plain strided tensors", FASTPATCH_TENSOR_REASONS)                    \
  X(shapes, "their shapes are equal, or broadcast where that is served", shape_mismatch)                \
  X(devices, "they are on one device", device)                                                          \
  X(dtypes, "their dtypes are served together", complex, dtype)                                         \
  X(precision, "{threshold} is large enough for the dtype", beta, delta)                                \
  X(order, "their elements lie in an order that is served", strides)                                    \
  X(memory, "they lie within their storages", storage)                                                  \
  X(cuda, "the native library serves this CUDA device", cuda_not_built, cuda_unproven)

enum class LossGuard { FASTPATCH_LOSS_GUARDS(FASTPATCH_GUARD_NAME) };

}  // namespace fastpatch
