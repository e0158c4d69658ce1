// Which parameters and groups SGD serves.
#include <algorithm>
#include <limits>

#include "cuda/sgd.h"
#include "memory_ranges.h"
#include "sgd.h"

namespace fastpatch {
namespace {

// float64 is not used to its limits: no hyperparameter goes beyond those of float32.
// On CUDA devices they aren't rounded to a reduced type.
double largest_number(const at::Tensor& param) {
  switch (param.is_cuda() ? at::kFloat : param.scalar_type()) {
    case at::kHalf:
      return std::numeric_limits<at::Half>::max();
    case at::kBFloat16:
      return std::numeric_limits<at::BFloat16>::max();
    default:
      return std::numeric_limits<float>::max();
  }
}

// Last: the self-test on a CUDA device is asked for by a parameter that passes all else.
C10_ALWAYS_INLINE Reason check_device(const at::Tensor& param, Asked* asked) {
  asked->ask(SgdGuard::cuda);
  return sgd_cuda_proofs().check(param);
}

// Of an item whose parameter and gradient, in these memories, passed.
Reason check_buffer(const SgdItem& item, const Range& param, const Range& grad) {
  if (check_floating_anywhere(*item.buffer) != Reason::served || item.buffer->device() != item.param->device() ||
      item.buffer->scalar_type() != item.param->scalar_type() || item.buffer->sizes() != item.param->sizes()) {
    return Reason::momentum_buffer;
  }
  const Reason reason = check_memory(*item.param, *item.buffer, /*exact=*/false);
  if (reason != Reason::served) {
    return reason;
  }
  const Range buffer = memory_of(*item.buffer);
  return overlap(buffer, param) || overlap(buffer, grad) ? Reason::overlap : Reason::served;
}

// Inlined, so that what was asked is a constant at each return: this runs for every parameter of every step.
C10_ALWAYS_INLINE Reason check_item(const SgdItem& item, Asked* asked) {
  asked->ask(SgdGuard::param_tensor);
  Reason reason = check_floating_anywhere(*item.param);
  if (reason != Reason::served) {
    return reason;
  }
  asked->ask(SgdGuard::grad_tensor);
  if (item.grad->layout() == at::kSparse) {
    return Reason::sparse_grad;
  }
  reason = check_floating_anywhere(*item.grad);
  if (reason != Reason::served) {
    return reason;
  }
  asked->ask(SgdGuard::alike);
  if (item.param->device() != item.grad->device()) {
    return Reason::device;
  }
  if (item.param->scalar_type() != item.grad->scalar_type()) {
    return Reason::dtype;
  }
  if (item.param->sizes() != item.grad->sizes()) {
    return Reason::shape_mismatch;
  }
  asked->ask(SgdGuard::order);
  // A first buffer's strides derive from the gradient's.
  reason = check_memory(*item.param, *item.grad, /*exact=*/item.first);
  if (reason != Reason::served) {
    return reason;
  }
  asked->ask(SgdGuard::apart);
  const Range param = memory_of(*item.param);
  const Range grad = memory_of(*item.grad);
  if (overlap(param, grad)) {
    return Reason::overlap;
  }
  if (item.buffer->defined()) {
    asked->ask(SgdGuard::buffer);
    reason = check_buffer(item, param, grad);
  }
  return reason == Reason::served && item.param->is_cuda() ? check_device(*item.param, asked) : reason;
}

}  // namespace

void settle_foreach(const std::vector<SgdItem>& items, size_t begin, size_t end, SgdHyper* hyper) {
  const auto is_on_cuda = [](const SgdItem& item) { return item.param->is_cuda(); };
  if (hyper->chooses_foreach && begin < end && is_on_cuda(items[begin])) {
    hyper->foreach =
        std::all_of(items.begin() + static_cast<int64_t>(begin), items.begin() + static_cast<int64_t>(end), is_on_cuda);
  }
}

CudaProofs& sgd_cuda_proofs() {
  static CudaProofs proofs(cuda::sgd != nullptr);
  return proofs;
}

Reason check_sgd_item(const SgdItem& item, Asked* asked) {
  Asked here;
  const Reason reason = check_item(item, &here);
  asked->add(here);
  return reason;
}

bool write_hyper(const std::vector<SgdItem>& items, size_t begin, size_t end, const SgdHyper& hyper) {
  for (const void* tensor : hyper.tensors) {
    const auto* const byte = static_cast<const char*>(tensor);
    const auto holds = [byte](const SgdItem::Tensor& written) {
      return written->defined() && overlap({byte, byte + 1}, memory_of(*written));
    };
    for (size_t i = begin; byte != nullptr && i < end; ++i) {
      if (holds(items[i].param) || holds(items[i].buffer) || (writes_grad(hyper) && holds(items[i].grad))) {
        return true;
      }
    }
  }
  return false;
}

Reason check_sgd_group(
    const std::vector<SgdItem>& items, size_t begin, size_t end, const SgdHyper& hyper, Asked* asked) {
  asked->ask(SgdGuard::precision);
  const auto is_too_small = [&](const SgdItem& item) { return hyper.largest > largest_number(*item.param); };
  if (C10_UNLIKELY(hyper.largest > std::numeric_limits<at::Half>::max()) &&
      std::any_of(
          items.begin() + static_cast<int64_t>(begin), items.begin() + static_cast<int64_t>(end), is_too_small)) {
    return Reason::hyperparameter;
  }
  asked->ask(SgdGuard::hyper_memory);
  if (write_hyper(items, begin, end, hyper)) {
    return Reason::tensor_hyperparameter;
  }
  if (!hyper.foreach) {
    return Reason::served;
  }
  asked->ask(SgdGuard::foreach_order);
  std::vector<Touched> ranges;
  ranges.reserve((end - begin) * 3);
  for (size_t i = begin; i < end; ++i) {
    if (items[i].is_shard != items[begin].is_shard) {
      return Reason::foreach;  // stock raises
    }
    ranges.push_back({memory_of(*items[i].param), true});
    ranges.push_back({memory_of(*items[i].grad), writes_grad(hyper)});
    if (items[i].buffer->defined()) {
      ranges.push_back({memory_of(*items[i].buffer), true});
    }
  }
  return independent(ranges) ? Reason::served : Reason::foreach;
}

}  // namespace fastpatch
