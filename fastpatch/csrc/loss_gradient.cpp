#include <algorithm>
#include <memory>

#include <ATen/Parallel.h>
#include <ATen/core/Reduction.h>

#include "capability.h"
#include "cpu/copy_rows.h"
#include "grain.h"
#include "losses.h"
#include "observe.h"
#include "result_memory.h"

namespace fastpatch {
namespace {

// Stride 0 in every dimension: one value, as the backward of sum() and of mean() hands out.
bool is_one_value(const at::Tensor& tensor) {
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.stride(dim) != 0 && tensor.size(dim) != 1) {
      return false;
    }
  }
  return true;
}

// Does stock compute in the dtype of the loss, which is that of its gradient? It does for operands of that dtype, and
// for mixtures that it promotes to float32. A hook on a saved tensor may return other dtypes than were saved: stock
// then promotes by the operands alone, or raises.
bool computes_in(at::ScalarType dtype, const LossGradientCall& call) {
  const auto input = call.input->scalar_type();
  const auto target = call.target->scalar_type();
  if (input == target) {
    return input == dtype;
  }
  const auto promotes = [](at::ScalarType type) {
    return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
  };
  return loss_of(call.name).output == LossOutput::iterator && dtype == at::kFloat && promotes(input) &&
         promotes(target);
}

// Operands and results of other types than T go through here, a block at a time.
template <class T>
struct Block {
  static constexpr int64_t n = 2048;

  T input[n];
  T target[n];
  T result[n];
};

template <class T>
class GradientLoop {
 public:
  explicit GradientLoop(const LossGradientCall& call)
      : call_(call),
        kernel_(loss_of(call.name).backward.of<T>().gradient),
        one_grad_output_(is_one_value(*call.grad_output)),
        grad_output_(call.grad_output->const_data_ptr<T>()),
        norm_(call.reduction == at::Reduction::Mean ? 1.0 / static_cast<double>(call.input->numel()) : 1.0) {}

  at::Tensor run() {
    const at::Tensor result = empty_result(call_.input->sizes(), call_.input->scalar_type());
    const bool direct = call_.input->scalar_type() == dtype && call_.target->scalar_type() == dtype;
    void* const out = result.mutable_data_ptr();
    at::parallel_for(0, result.numel(), grain, [&](int64_t begin, int64_t end) {
      direct ? run_direct(static_cast<T*>(out), begin, end)
             : run_in_blocks(result, static_cast<char*>(out), begin, end);
    });
    return result;
  }

 private:
  static constexpr at::ScalarType dtype = c10::CppTypeToScalarType<T>::value;

  const T* grad_output(int64_t i) const {
    return one_grad_output_ ? grad_output_ : grad_output_ + i;
  }

  void run_direct(T* out, int64_t begin, int64_t end) const {
    kernel_(
        out + begin,
        call_.input->const_data_ptr<T>() + begin,
        call_.target->const_data_ptr<T>() + begin,
        grad_output(begin),
        one_grad_output_,
        end - begin,
        norm_,
        call_.threshold);
  }

  void run_in_blocks(const at::Tensor& result, char* out, int64_t begin, int64_t end) const {
    static const auto copy = FASTPATCH_CHOOSE(copy_rows(), /*has_avx512_kernel=*/false);
    const auto block = std::make_unique<Block<T>>();
    for (int64_t i = begin; i < end; i += Block<T>::n) {
      const int64_t n = std::min(Block<T>::n, end - i);
      const auto read = [&](const at::Tensor& tensor, T* into) {
        const auto item = static_cast<int64_t>(tensor.itemsize());
        const char* const from = static_cast<const char*>(tensor.const_data_ptr()) + i * item;
        copy(into, dtype, {from, tensor.scalar_type(), 1, 0}, n, 1);
      };
      read(*call_.input, block->input);
      read(*call_.target, block->target);
      kernel_(block->result, block->input, block->target, grad_output(i), one_grad_output_, n, norm_, call_.threshold);
      copy(out + i * static_cast<int64_t>(result.itemsize()), result.scalar_type(), {block->result, dtype, 1, 0}, n, 1);
    }
  }

  const LossGradientCall& call_;
  decltype(LossKernelsOf<T>::gradient) kernel_;
  bool one_grad_output_;
  const T* grad_output_;
  double norm_;
};

}  // namespace

// Only contiguous operands: stock's gradient is always contiguous, and over other layouts it runs its scalar formula.
bool is_gradient_served(const LossGradientCall& call) {
  const at::Tensor& grad = *call.grad_output;
  const at::Tensor& input = *call.input;
  const at::Tensor& target = *call.target;
  for (const at::Tensor* tensor : {&grad, &input, &target}) {
    if (check_tensor_anywhere(*tensor) != Reason::served || tensor->is_cuda() != input.is_cuda()) {
      return false;
    }
  }
  return check_thread() == Reason::served && input.numel() > 0 && input.is_contiguous() && target.is_contiguous() &&
         input.sizes() == target.sizes() && check_storage(input, target) == Reason::served &&
         computes_in(grad.scalar_type(), call) && (grad.dim() == 0 || grad.sizes() == input.sizes()) &&
         (is_one_value(grad) || grad.is_contiguous()) && check_storage(grad, grad) == Reason::served &&
         (!input.is_cuda() || is_gradient_served_on_cuda(call));
}

at::Tensor loss_gradient(const LossGradientCall& call) {
  if (!is_gradient_served(call)) {
    return loss_of(call.name).stock_gradient(
        *call.grad_output, *call.input, *call.target, call.reduction, call.threshold);
  }
  const ObservedRange range(loss_of(call.name).backward_range);
  if (call.input->is_cuda()) {
    return loss_gradient_on_cuda(call, is_one_value(*call.grad_output));
  }
  switch (call.grad_output->scalar_type()) {
    case at::kDouble:
      return GradientLoop<double>(call).run();
    case at::kBFloat16:
      return GradientLoop<at::BFloat16>(call).run();
    case at::kHalf:
      return GradientLoop<at::Half>(call).run();
    default:
      return GradientLoop<float>(call).run();
  }
}

}  // namespace fastpatch
