// Why a call falls back to stock. `served` is the only one that lets a kernel run.
// One list for the counters, explain() and the documentation.
#pragma once

namespace fastpatch {

// X(code, what it means and what the caller can do)
#define FASTPATCH_REASONS(X)                                                                                          \
  X(served, "served by the compiled implementation")                                                                  \
  X(arguments, "an argument has a type or value that only PyTorch's own parser judges")                               \
  X(torch_function, "a __torch_function__ override of an argument, or a mode, takes the call")                        \
  X(subclass, "a tensor subclass; torch.Tensor and torch.nn.Parameter are served, and DTensor by SGD")                \
  X(dispatch_mode, "a __torch_dispatch__ mode (fake tensors, functionalization, ...) is active")                      \
  X(functorch, "inside torch.func / vmap, or a tensor that one of them wraps")                                        \
  X(tracing, "torch.jit.trace is recording")                                                                          \
  X(compiling, "an optimizer's step inside torch.compile'd code, which may compile it")                               \
  X(inference_mode, "inside torch.inference_mode()")                                                                  \
  X(inference_tensor, "a tensor made inside torch.inference_mode()")                                                  \
  X(dispatch_state, "the thread's dispatch keys are not those of plain eager code")                                   \
  X(forward_ad, "inside a level of forward-mode differentiation, where tensors may carry tangents")                   \
  X(device, "tensors on different devices, or on one that is neither the CPU nor a CUDA GPU")                         \
  X(cuda_not_built, "a CUDA tensor, and the native library has no CUDA kernels")                                      \
  X(cuda_unproven,                                                                                                    \
    "the self-test on this GPU found a difference, or couldn't run yet, as a CUDA graph was being captured")          \
  X(layout, "a tensor is not strided (sparse, mkldnn, nested, ...)")                                                  \
  X(lazy_negation, "a lazily negated or conjugated view; `.resolve_neg()` makes it plain")                            \
  X(complex, "complex numbers")                                                                                       \
  X(dtype,                                                                                                            \
    "a dtype or a mixture that is not served: floating-point ones are, for SGD one for a parameter and its gradient") \
  X(shape_mismatch, "the tensors differ in shape, and stock raises, or broadcasts where that is not served")          \
  X(strides, "gaps, or elements in another order, that are not served; `.contiguous()` helps")                        \
  X(storage, "a tensor reaches beyond its storage")                                                                   \
  X(beta, "beta must be zero, or a number of at least 2.4e-38 (4.5e-308 for float64)")                                \
  X(legacy_arguments, "size_average or reduce is neither a bool nor None")                                            \
  X(delta, "delta must be a number of at least 2.4e-38 (4.5e-308 for float64)")                                       \
  X(weight, "a Huber loss with a weight for each element")                                                            \
  X(placements, "a DTensor that is divided otherwise than its gradient or momentum buffer, or holds a partial sum")   \
  X(sparse_grad, "the gradient is sparse")                                                                            \
  X(overlap, "a parameter shares memory with its own gradient or momentum buffer")                                    \
  X(momentum_buffer, "the momentum buffer is not a plain tensor like its parameter")                                  \
  X(hyperparameter, "a hyperparameter is not a Python number that float32 and the parameters' dtype can hold")        \
  X(tensor_hyperparameter,                                                                                            \
    "a hyperparameter is a tensor: only lr and weight_decay may be, on the CPU, without dimensions or gradient, "     \
    "apart from what the step writes")                                                                                \
  X(foreach,                                                                                                          \
    "foreach=True, and parameters of a group share memory, so that its order of operations shows, or not all are "    \
    "DTensors")                                                                                                       \
  X(fused, "fused=True: stock's kernel rounds in another order, which depends on how torch was compiled")             \
  X(differentiable, "differentiable=True: the step itself is differentiated")                                         \
  X(grad_scale, "a GradScaler handed grad_scale or found_inf to the step")                                            \
  X(non_leaf, "a parameter without gradient is not a leaf of the graph, which PyTorch warns of")                      \
  X(optimizer, "the optimizer is not SGD, has a step of its own, or keeps its groups or state in other containers")

enum class Reason : int {
#define FASTPATCH_ENUM(code, text) code,
  FASTPATCH_REASONS(FASTPATCH_ENUM)
#undef FASTPATCH_ENUM
      count
};

const char* reason_code(Reason reason);
const char* reason_text(Reason reason);

}  // namespace fastpatch
