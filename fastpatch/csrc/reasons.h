// Why a call falls back to stock. `served` is the only one that lets a kernel run.
// One list for the counters, explain(), reports and the documentation.
#pragma once

namespace fastpatch {

// X(code, what it means, what the user can do to have such a call served)
#define FASTPATCH_REASONS(X)                                                                                          \
  X(served, "served by the compiled implementation", "")                                                              \
  X(arguments,                                                                                                        \
    "an argument has a type or value that only PyTorch's own parser judges",                                          \
    "pass arguments of the documented types; whatever else there is, PyTorch's own parser has to judge "              \
    "it or raise")                                                                                                    \
  X(torch_function,                                                                                                   \
    "a __torch_function__ override of an argument, or a mode, takes the call",                                        \
    "pass plain tensors, tensor.as_subclass(torch.Tensor), outside the mode; nothing, if the override or "            \
    "mode has to see the call")                                                                                       \
  X(subclass,                                                                                                         \
    "a tensor subclass; torch.Tensor and torch.nn.Parameter are served, and DTensor by SGD",                          \
    "pass a plain tensor, tensor.as_subclass(torch.Tensor), unless the subclass's own behaviour is needed")           \
  X(dispatch_mode,                                                                                                    \
    "a __torch_dispatch__ mode (fake tensors, functionalization, ...) is active",                                     \
    "call it outside the mode; nothing, if the mode has to see its operators")                                        \
  X(functorch,                                                                                                        \
    "inside torch.func / vmap, or a tensor that one of them wraps",                                                   \
    "call it outside torch.func's transforms; inside, nothing: they have to see PyTorch's operators")                 \
  X(tracing,                                                                                                          \
    "torch.jit.trace is recording",                                                                                   \
    "nothing: a trace has to record PyTorch's operators; calls outside torch.jit.trace are served")                   \
  X(compiling,                                                                                                        \
    "an optimizer's step inside torch.compile'd code, which may compile it",                                          \
    "call step() outside the compiled function")                                                                      \
  X(inference_mode, "inside torch.inference_mode()", "use torch.no_grad() in place of torch.inference_mode()")        \
  X(inference_tensor,                                                                                                 \
    "a tensor made inside torch.inference_mode()",                                                                    \
    "make it outside torch.inference_mode(), or copy it there: tensor.clone()")                                       \
  X(dispatch_state,                                                                                                   \
    "the thread's dispatch keys are not those of plain eager code",                                                   \
    "call it outside the context manager that changes the dispatch keys, if none of its effects is needed")           \
  X(forward_ad,                                                                                                       \
    "inside a level of forward-mode differentiation, where tensors may carry tangents",                               \
    "call it outside torch.autograd.forward_ad.dual_level(), with plain tensors")                                     \
  X(device,                                                                                                           \
    "tensors on different devices, or on one that is neither the CPU nor a CUDA GPU",                                 \
    "move all to one device, the CPU or a CUDA GPU, e.g. target.to(input.device)")                                    \
  X(cuda_not_built,                                                                                                   \
    "a CUDA tensor, and the native library has no CUDA kernels",                                                      \
    "install the nvcc of torch's CUDA release; python -m fastpatch doctor tells which, and the next "                 \
    "process builds the kernels")                                                                                     \
  X(cuda_unproven,                                                                                                    \
    "the self-test on this GPU found a difference, or couldn't run yet, as a CUDA graph was being "                   \
    "captured",                                                                                                       \
    "make one such call before the capture; where a warning told of a difference, nothing: PyTorch goes "             \
    "on serving that dtype")                                                                                          \
  X(layout,                                                                                                           \
    "a tensor is not strided (sparse, mkldnn, nested, ...)",                                                          \
    "make it strided, once, where it is made: tensor.to_dense()")                                                     \
  X(lazy_negation,                                                                                                    \
    "a lazily negated or conjugated view",                                                                            \
    "call .resolve_neg() or .resolve_conj() on it once, where it is made")                                            \
  X(complex, "complex numbers", "nothing: only real numbers are served")                                              \
  X(dtype,                                                                                                            \
    "a dtype or a mixture that is not served: floating-point ones are, for SGD one for a parameter and "              \
    "its gradient",                                                                                                   \
    "give both one floating-point dtype, float32, float64, bfloat16 or float16: target.to(input.dtype)")              \
  X(shape_mismatch,                                                                                                   \
    "the tensors differ in shape, and stock raises, or broadcasts where that is not served",                          \
    "give both one shape, e.g. target.view_as(input)")                                                                \
  X(strides,                                                                                                          \
    "gaps, or elements in another order, that are not served",                                                        \
    "call .contiguous() on both once, where they are made")                                                           \
  X(storage,                                                                                                          \
    "a tensor reaches beyond its storage",                                                                            \
    "call it while the storage holds all elements: storage.resize_(), or FSDP, has made it smaller")                  \
  X(beta,                                                                                                             \
    "beta must be zero, or a number of at least 2.4e-38 (4.5e-308 for float64)",                                      \
    "pass a Python number in that range; 0.0 makes it the L1 loss")                                                   \
  X(legacy_arguments,                                                                                                 \
    "size_average or reduce is neither a bool nor None",                                                              \
    "pass reduction='mean', 'sum' or 'none' in their place")                                                          \
  X(delta, "delta must be a number of at least 2.4e-38 (4.5e-308 for float64)", "pass a Python number in that range") \
  X(weight,                                                                                                           \
    "a Huber loss with a weight for each element",                                                                    \
    "multiply by it yourself, as PyTorch does: (F.huber_loss(input, target, reduction='none') * "                     \
    "weight).mean()")                                                                                                 \
  X(placements,                                                                                                       \
    "a DTensor that is divided otherwise than its gradient or momentum buffer, or holds a partial sum",               \
    "divide the gradient and the buffer as the parameter is: "                                                        \
    "grad.redistribute(placements=param.placements)")                                                                 \
  X(sparse_grad,                                                                                                      \
    "the gradient is sparse",                                                                                         \
    "make the layer with sparse=False, or set param.grad = param.grad.to_dense() before the step")                    \
  X(overlap,                                                                                                          \
    "a parameter shares memory with its own gradient or momentum buffer",                                             \
    "give each memory of its own, e.g. param.grad = param.grad.clone()")                                              \
  X(momentum_buffer,                                                                                                  \
    "the momentum buffer is not a plain tensor like its parameter",                                                   \
    "let the step make its buffer, or load_state_dict() cast it: of the parameter's shape, dtype and "                \
    "device")                                                                                                         \
  X(hyperparameter,                                                                                                   \
    "a hyperparameter is not a Python number that float32 and the parameters' dtype can hold",                        \
    "pass finite Python floats that the dtype can hold")                                                              \
  X(tensor_hyperparameter,                                                                                            \
    "a hyperparameter is a tensor: only lr and weight_decay may be, on the CPU, without dimensions or "               \
    "gradient, apart from what the step writes",                                                                      \
    "pass Python numbers, e.g. lr=float(lr)")                                                                         \
  X(foreach,                                                                                                          \
    "foreach=True, and parameters of a group share memory, so that its order of operations shows, or not "            \
    "all are DTensors",                                                                                               \
    "leave foreach=True out, or put parameters that share memory, or are no DTensors, in groups of their "            \
    "own")                                                                                                            \
  X(fused,                                                                                                            \
    "fused=True: stock's kernel rounds in another order, which depends on how torch was compiled",                    \
    "leave fused=True out: fastpatch updates all tensors of a group in one pass, too")                                \
  X(differentiable,                                                                                                   \
    "differentiable=True: the step itself is differentiated",                                                         \
    "leave differentiable=True out; call the function sgd under torch.no_grad(), as SGD.step does")                   \
  X(grad_scale,                                                                                                       \
    "a GradScaler handed grad_scale or found_inf to the step",                                                        \
    "leave fused=True out, so that the GradScaler unscales before the step, and set no "                              \
    "optimizer.grad_scale")                                                                                           \
  X(non_leaf,                                                                                                         \
    "a parameter without gradient is not a leaf of the graph, which PyTorch warns of",                                \
    "hand the optimizer leaves: parameter.detach().requires_grad_(), or nn.Parameter")                                \
  X(optimizer,                                                                                                        \
    "the optimizer is not SGD, has a step of its own, or keeps its groups or state in other containers",              \
    "use SGD's own step, with param_groups and state as SGD makes them; nothing, if a library needs its "             \
    "own")

enum class Reason : int {
#define FASTPATCH_ENUM(code, text, advice) code,
  FASTPATCH_REASONS(FASTPATCH_ENUM)
#undef FASTPATCH_ENUM
      count
};

const char* reason_code(Reason reason);
const char* reason_text(Reason reason);
const char* reason_advice(Reason reason);

}  // namespace fastpatch
