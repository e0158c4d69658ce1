#include "losses.h"

#include <limits>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/grad_mode.h>
#include <ATen/native/PointwiseOps.h>
#include <ATen/native/ReduceOps.h>
#include <ATen/ops/huber_loss_backward_ops.h>
#include <ATen/ops/l1_loss_ops.h>
#include <ATen/ops/smooth_l1_loss_backward_ops.h>
#include <c10/util/SmallVector.h>

#include "capability.h"
#include "grain.h"
#include "loss_operands.h"
#include "observe.h"

namespace fastpatch {
namespace {

// The threads leave one partial sum each, of what stock's buffer of partial sums holds.
template <class Sum, class Partial, class OfShare, class OfPartials>
Sum sum_over_threads(int64_t n, const OfShare& of_share, const OfPartials& of_partials) {
  const int threads = at::get_num_threads();
  if (n < grain || threads == 1 || at::in_parallel_region()) {
    return of_share(0, n);
  }
  c10::SmallVector<Partial, 64> partials(threads, Partial(0));
  at::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) {
    partials[at::get_thread_num()] = static_cast<Partial>(of_share(begin, end));
  });
  return of_partials(partials.data(), threads);
}

// The sum follows the vector width of stock's sum kernel; the values themselves are alike at any width.
const LossKernels& forward_kernels(const LossCall& call) {
  static const auto l1 = FASTPATCH_CHOOSE(l1_loss_kernels(), at::native::sum_stub.AVX512 != nullptr);
  return call.threshold == 0 ? l1 : loss_of(call.name).forward;
}

template <class T>
T reduced(const LossCall& call, const LossOperands<T>& operands, int64_t n) {
  const auto& kernels = forward_kernels(call);
  using Sum = typename LossKernelsOf<T>::Sum;
  constexpr bool is_reduced_type = !std::is_same_v<Sum, T>;
  if (is_reduced_type && call.reduction == at::Reduction::Mean) {
    const float total = sum_over_threads<float, float>(
        n,
        [&](int64_t begin, int64_t end) { return kernels.of<T>().sum_in_float(operands, begin, end, call.threshold); },
        kernels.float32.sum_row);
    return static_cast<T>(total / static_cast<float>(n));
  }
  const Sum total = sum_over_threads<Sum, T>(
      n,
      [&](int64_t begin, int64_t end) { return kernels.of<T>().sum(operands, begin, end, call.threshold); },
      kernels.of<T>().sum_row);
  return static_cast<T>(call.reduction == at::Reduction::Mean ? total / static_cast<Sum>(n) : total);
}

template <class T>
at::Tensor value_of(const LossCall& call) {
  const auto& kernels = forward_kernels(call).of<T>();
  if (call.reduction == at::Reduction::None) {
    return loss_values(call, kernels);
  }
  const OperandReader<T> operands(call);
  at::Tensor output(at::detail::empty_cpu({}, call.dtype));
  *output.mutable_data_ptr<T>() = reduced<T>(call, operands.operands(), call.input->numel());
  return output;
}

bool is_reduced_type(at::ScalarType dtype) {
  return dtype == at::kBFloat16 || dtype == at::kHalf;
}

// Those that PyTorch promotes to any floating-point type. (The larger unsigned ones it doesn't, and bool it doesn't
// subtract.)
bool is_whole_number_type(at::ScalarType dtype) {
  return dtype == at::kByte || (c10::isIntegralType(dtype, /*includeBool=*/false) && c10::isSignedType(dtype));
}

// The dtype that stock computes in.
Reason choose_dtype(LossCall* call) {
  at::ScalarType input = call->input->scalar_type();
  at::ScalarType target = call->target->scalar_type();
  if (C10_LIKELY(input == at::kFloat && target == at::kFloat)) {
    call->dtype = at::kFloat;
    return Reason::served;
  }
  if ((is_reduced_type(input) || is_reduced_type(target)) && is_autocasting(*call->input)) {
    call->casts_input = is_reduced_type(input);
    call->casts_target = is_reduced_type(target);
    input = call->casts_input ? at::kFloat : input;
    target = call->casts_target ? at::kFloat : target;
  }
  const auto known = [](at::ScalarType type) {
    return type == at::kFloat || type == at::kDouble || is_reduced_type(type);
  };
  if (known(input) && is_whole_number_type(target)) {
    call->dtype = input;
    return call->input->is_cuda() ? Reason::dtype : Reason::served;
  }
  if (!known(input) || !known(target)) {
    return call->input->is_complex() || call->target->is_complex() ? Reason::complex : Reason::dtype;
  }
  call->dtype = input == target ? input : at::kFloat;
  // Stock's Huber loss of mixed types ends in an error of its backward.
  const bool mixes = input != target && (input == at::kDouble || target == at::kDouble ||
                                         loss_of(call->name).output == LossOutput::like_input);
  return mixes ? Reason::dtype : Reason::served;
}

// Stock's compiler may have contracted `z - 0.5 * beta`, which shows unless half of beta is exact; with denormals
// flushed to zero it has to be normal for that.
template <class T>
bool is_half_normal(double threshold) {
  return static_cast<T>(threshold) >= 2 * std::numeric_limits<T>::min();
}

Loss make_loss(LossName name) {
#define FASTPATCH_MAKE(loss, node, threshold, backward_stub, output, zero, parameters)                               \
  if (name == LossName::loss) {                                                                                      \
    return {                                                                                                         \
        #loss,                                                                                                       \
        "fastpatch::" #loss,                                                                                         \
        "fastpatch::" #loss "_backward",                                                                             \
        LossOutput::output,                                                                                          \
        ZeroThreshold::zero,                                                                                         \
        Reason::threshold,                                                                                           \
        FASTPATCH_CHOOSE(loss##_kernels(), at::native::sum_stub.AVX512 != nullptr),                                  \
        FASTPATCH_CHOOSE(loss##_kernels(), at::native::backward_stub.AVX512 != nullptr),                             \
        cuda::loss##_kernels == nullptr ? cuda::LossKernels() : cuda::loss##_kernels(),                              \
        [](const at::Tensor& grad_output,                                                                            \
           const at::Tensor& input,                                                                                  \
           const at::Tensor& target,                                                                                 \
           int64_t reduction,                                                                                        \
           double width) { return at::_ops::loss##_backward::call(grad_output, input, target, reduction, width); }}; \
  }
  FASTPATCH_LOSSES(FASTPATCH_MAKE)
#undef FASTPATCH_MAKE
  TORCH_INTERNAL_ASSERT(false, "no such loss");
}

}  // namespace

const Loss& loss_of(LossName name) {
#define FASTPATCH_COUNT(...) +1
  static const auto all = [] {
    std::vector<Loss> losses;
    for (int i = 0; i < (FASTPATCH_LOSSES(FASTPATCH_COUNT)); ++i) {
      losses.push_back(make_loss(static_cast<LossName>(i)));
    }
    return losses;
  }();
#undef FASTPATCH_COUNT
  return all[static_cast<size_t>(name)];
}

Reason check_loss(LossCall* call) {
  const at::Tensor& input = *call->input;
  const at::Tensor& target = *call->target;
  call->asked.ask(LossGuard::thread);
  Reason reason = check_thread();
  if (reason != Reason::served) {
    return reason;
  }
  call->asked.ask(LossGuard::tensors);
  reason = check_tensor_anywhere(input);
  if (reason == Reason::served) {
    reason = check_tensor_anywhere(target);
  }
  if (reason != Reason::served) {
    return reason;
  }
  call->asked.ask(LossGuard::shapes);
  if (input.sizes() != target.sizes()) {
    return Reason::shape_mismatch;
  }
  call->asked.ask(LossGuard::devices);
  if (input.is_cuda() != target.is_cuda() || (input.is_cuda() && input.device() != target.device())) {
    return Reason::device;
  }
  call->asked.ask(LossGuard::dtypes);
  reason = choose_dtype(call);
  if (reason != Reason::served) {
    return reason;
  }
  call->asked.ask(LossGuard::precision);
  if (call->threshold != 0 && !(call->dtype == at::kDouble ? is_half_normal<double>(call->threshold)
                                                           : is_half_normal<float>(call->threshold))) {
    return loss_of(call->name).bad_threshold;
  }
  return input.is_cuda() ? check_loss_on_cuda(call) : check_loss_order(call);
}

at::Tensor loss_value(const LossCall& call) {
  if (call.input->is_cuda()) {
    return loss_value_on_cuda(call);
  }
  switch (call.dtype) {
    case at::kDouble:
      return value_of<double>(call);
    case at::kBFloat16:
      return value_of<at::BFloat16>(call);
    case at::kHalf:
      return value_of<at::Half>(call);
    default:
      return value_of<float>(call);
  }
}

bool is_recorded(const at::Tensor& input, const at::Tensor& target) {
  return at::GradMode::is_enabled() && (input.requires_grad() || target.requires_grad());
}

at::Tensor loss(const LossCall& call) {
  const ObservedRange range(loss_of(call.name).range);
#ifdef FASTPATCH_DEBUG
  LossCall again = call;
  TORCH_INTERNAL_ASSERT(check_loss(&again) == Reason::served && again.dtype == call.dtype);
#endif
  const bool records = is_recorded(*call.input, *call.target);
  if (records && call.threshold == 0) {
    // Nothing to gain but the way through Python: stock's graph is of three operators, the second of which keeps the
    // difference.
    return at::_ops::l1_loss::call(*call.input, *call.target, call.reduction);
  }
  return records ? recorded_loss(call) : loss_value(call);
}

}  // namespace fastpatch
