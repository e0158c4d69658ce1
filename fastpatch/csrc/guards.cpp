#include "guards.h"

#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace fastpatch {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

// The keys of a strided CPU tensor made outside inference mode, and nothing else.
constexpr DispatchKeySet plain_keys{
    DispatchKey::CPU, DispatchKey::ADInplaceOrView, DispatchKey::AutogradCPU, DispatchKey::AutocastCPU};

// Before torch 2.13 named tensors had a key, which the autograd engine excludes during a backward.
template <class Key>
constexpr DispatchKeySet named_key() {
  if constexpr (requires { Key::Named; }) {
    return DispatchKeySet(Key::Named);
  } else {
    return {};
  }
}

// What a thread may include or exclude without a consequence for plain float32 tensors. Autocast toggles its keys, and
// none of our operations casts a float32 operand.
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
  if (!tensor.device().is_cpu()) {
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
bool same_order(const at::Tensor& a, const at::Tensor& b) {
  for (int64_t dim = 0; dim < a.dim(); ++dim) {
    if (a.size(dim) != 1 && a.stride(dim) != b.stride(dim)) {
      return false;
    }
  }
  return true;
}

// A storage that was shrunk behind a tensor's back (FSDP does it) must not be read. For dense tensors only.
bool fits_storage(const at::Tensor& tensor) {
  const auto& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  const int64_t end = (tensor.storage_offset() + tensor.numel()) * static_cast<int64_t>(sizeof(float));
  return tensor.numel() == 0 || end <= static_cast<int64_t>(storage.nbytes());
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
  return Reason::served;
}

Reason check_tensor(const at::Tensor& tensor) {
  if (C10_UNLIKELY(tensor.key_set() != plain_keys)) {
    return explain_keys(tensor);
  }
  if (C10_UNLIKELY(tensor.scalar_type() != at::kFloat)) {
    return tensor.is_complex() ? Reason::complex : Reason::dtype;
  }
  if (C10_UNLIKELY(tensor._fw_grad(/*level=*/0).defined())) {
    return Reason::forward_ad;
  }
  return Reason::served;
}

Reason check_memory(const at::Tensor& a, const at::Tensor& b, bool exact) {
  if (C10_UNLIKELY(!(a.is_contiguous() && b.is_contiguous()))) {
    if (!a.is_non_overlapping_and_dense() || !(a.strides() == b.strides() || (!exact && same_order(a, b)))) {
      return Reason::strides;
    }
  }
  return fits_storage(a) && fits_storage(b) ? Reason::served : Reason::storage;
}

at::Tensor empty_elementwise(const at::Tensor& a, const at::Tensor& b) {
  if (C10_LIKELY(a.is_contiguous() && b.is_contiguous())) {
    return at::Tensor(at::detail::empty_cpu(a.sizes(), at::kFloat));
  }
  if (a.is_contiguous(at::MemoryFormat::ChannelsLast) && b.is_contiguous(at::MemoryFormat::ChannelsLast)) {
    return at::Tensor(at::detail::empty_cpu(a.sizes(), at::kFloat, false, at::MemoryFormat::ChannelsLast));
  }
  return at::Tensor(at::detail::empty_strided_cpu(a.sizes(), a.strides(), at::kFloat));
}

}  // namespace fastpatch
