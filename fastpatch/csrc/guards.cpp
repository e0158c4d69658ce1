#include "guards.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/forward_grad.h>

namespace fastpatch {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

// The keys of a strided CPU tensor made outside inference mode, and nothing else.
constexpr DispatchKeySet plain_keys{
    DispatchKey::CPU, DispatchKey::ADInplaceOrView, DispatchKey::AutogradCPU, DispatchKey::AutocastCPU};

constexpr DispatchKeySet plain_cuda_keys{
    DispatchKey::CUDA, DispatchKey::ADInplaceOrView, DispatchKey::AutogradCUDA, DispatchKey::AutocastCUDA};

// Before torch 2.13 named tensors had a key, which the autograd engine excludes during a backward.
template <class Key>
constexpr DispatchKeySet named_key() {
  if constexpr (requires { Key::Named; }) {
    return DispatchKeySet(Key::Named);
  } else {
    return {};
  }
}

// What a thread may include or exclude without a consequence here. Autocast toggles its keys; what it does to operands
// of reduced precision is asked by is_autocasting().
constexpr DispatchKeySet harmless_keys = c10::autocast_dispatch_keyset | named_key<DispatchKey>();

// The state of a fresh thread.
constexpr DispatchKeySet plain_included = c10::default_included_set - harmless_keys;
constexpr DispatchKeySet plain_excluded = c10::default_excluded_set - harmless_keys;

Reason explain_keys(const at::Tensor& tensor) {
  const DispatchKeySet keys = tensor.key_set();
  if (keys.has(DispatchKey::Python)) {
    return Reason::subclass;
  }
  if (keys.has_any(c10::functorch_transforms_ks) || keys.has(DispatchKey::Functionalize)) {
    return Reason::functorch;
  }
  if (tensor.layout() != at::kStrided || keys.has(DispatchKey::NestedTensor)) {
    return Reason::layout;
  }
  if (!tensor.device().is_cpu() && !tensor.device().is_cuda()) {
    return Reason::device;
  }
  if (keys.has(DispatchKey::Negative) || keys.has(DispatchKey::Conjugate)) {
    return Reason::lazy_negation;
  }
  if (tensor.is_inference()) {
    return Reason::inference_tensor;
  }
  return Reason::dispatch_state;
}

Reason explain_thread(DispatchKeySet included, DispatchKeySet excluded) {
  if (included.has(DispatchKey::FuncTorchDynamicLayerFrontMode) || included.has_any(c10::functorch_transforms_ks)) {
    return Reason::functorch;
  }
  if (included.has(DispatchKey::Tracer)) {
    return Reason::tracing;
  }
  if (included.has(DispatchKey::Python) || included.has(DispatchKey::Functionalize)) {
    return Reason::dispatch_mode;
  }
  if (!included.has(DispatchKey::ADInplaceOrView) || excluded.has(DispatchKey::ADInplaceOrView)) {
    return Reason::inference_mode;
  }
  return Reason::dispatch_state;
}

// Equal strides wherever there is more than one element to step over.
bool same_strides(const at::Tensor& a, const at::Tensor& b) {
  for (int64_t dim = 0; dim < a.dim(); ++dim) {
    if (a.size(dim) != 1 && a.stride(dim) != b.stride(dim)) {
      return false;
    }
  }
  return true;
}

// A storage that was shrunk behind a tensor's back (FSDP does it) must not be read.
bool fits_storage(const at::Tensor& tensor) {
  const auto& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  int64_t end = tensor.numel();
  if (C10_UNLIKELY(!tensor.is_contiguous() && end != 0)) {
    end = 1;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
      end += (tensor.size(dim) - 1) * tensor.stride(dim);
    }
  }
  const int64_t item = static_cast<int64_t>(tensor.itemsize());
  return end == 0 || (tensor.storage_offset() + end) * item <= static_cast<int64_t>(storage.nbytes());
}

}  // namespace

bool in_torch_function_mode() {
  return at::impl::torch_function_mode_enabled();
}

Reason check_thread() {
  const auto state = c10::impl::tls_local_dispatch_key_set();
  const auto included = state.included_ - harmless_keys;
  const auto excluded = state.excluded_ - harmless_keys;
  if (C10_UNLIKELY(included != plain_included || excluded != plain_excluded)) {
    return explain_thread(included, excluded);
  }
  // A tensor could be asked for its tangent, but under a lock that other threads hold while they wait for the GIL.
  if (C10_UNLIKELY(torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr)) {
    return Reason::forward_ad;
  }
  return Reason::served;
}

bool is_autocasting(const at::Tensor& tensor) {
  const auto key = tensor.is_cuda() ? DispatchKey::AutocastCUDA : DispatchKey::AutocastCPU;
  return !c10::impl::tls_local_dispatch_key_set().excluded_.has(key);
}

Reason check_tensor(const at::Tensor& tensor) {
  if (C10_UNLIKELY(tensor.key_set() != plain_keys)) {
    const Reason reason = check_tensor_anywhere(tensor);
    return reason == Reason::served ? Reason::device : reason;
  }
  return Reason::served;
}

Reason check_tensor_anywhere(const at::Tensor& tensor) {
  if (C10_LIKELY(tensor.key_set() == plain_keys) || tensor.key_set() == plain_cuda_keys) {
    return Reason::served;
  }
  return explain_keys(tensor);
}

Reason check_floating_anywhere(const at::Tensor& tensor) {
  const Reason reason = check_tensor_anywhere(tensor);
  if (reason != Reason::served) {
    return reason;
  }
  switch (tensor.scalar_type()) {
    case at::kFloat:
    case at::kDouble:
    case at::kBFloat16:
    case at::kHalf:
      return Reason::served;
    default:
      return tensor.is_complex() ? Reason::complex : Reason::dtype;
  }
}

bool in_same_order(const at::Tensor& a, const at::Tensor& b) {
  return (a.is_contiguous() && b.is_contiguous()) || (a.is_non_overlapping_and_dense() && same_strides(a, b));
}

Reason check_storage(const at::Tensor& a, const at::Tensor& b) {
  return fits_storage(a) && fits_storage(b) ? Reason::served : Reason::storage;
}

Reason check_memory(const at::Tensor& a, const at::Tensor& b, bool exact) {
  if (C10_UNLIKELY(!(a.is_contiguous() && b.is_contiguous()))) {
    if (!in_same_order(a, b) || (exact && a.strides() != b.strides())) {
      return Reason::strides;
    }
  }
  return check_storage(a, b);
}

}  // namespace fastpatch
