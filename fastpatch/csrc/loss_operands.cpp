#include "loss_operands.h"

#include <algorithm>

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>

#include "capability.h"
#include "cpu/copy_rows.h"
#include "grain.h"
#include "result_memory.h"

namespace fastpatch {
namespace {

// Any capability gives the same bits.
template <class T>
void copy(T* out, const Rows& in, int64_t columns, int64_t rows) {
  static const auto copy_rows = FASTPATCH_CHOOSE(copy_rows(), /*has_avx512_kernel=*/false);
  copy_rows(out, c10::CppTypeToScalarType<T>::value, in, columns, rows);
}

Rows row_of(const at::Tensor& tensor, int64_t begin) {
  const auto item = static_cast<int64_t>(tensor.itemsize());
  return {static_cast<const char*>(tensor.const_data_ptr()) + begin * item, tensor.scalar_type(), 1, 0};
}

}  // namespace

Reason check_loss_order(LossCall* call) {
  const at::Tensor& input = *call->input;
  const at::Tensor& target = *call->target;
  call->asked.ask(LossGuard::order);
  call->same_order = in_same_order(input, target);
  if (C10_UNLIKELY(!call->same_order)) {
    // Stock's order is that of what it iterates over. An operand that it casts first, or whose like it makes for the
    // output, keeps its own order there only if it has no gaps.
    const bool needs_dense_input =
        input.scalar_type() != call->dtype || loss_of(call->name).output == LossOutput::like_input;
    const bool needs_dense_target = target.scalar_type() != call->dtype;
    if ((needs_dense_input && !input.is_non_overlapping_and_dense()) ||
        (needs_dense_target && !target.is_non_overlapping_and_dense())) {
      return Reason::strides;
    }
  }
  call->asked.ask(LossGuard::memory);
  return check_storage(input, target);
}

template <class T>
OperandReader<T>::OperandReader(const LossCall& call) : call_(call) {
  constexpr auto dtype = c10::CppTypeToScalarType<T>::value;
  if (call.same_order && call.input->scalar_type() == dtype && call.target->scalar_type() == dtype) {
    operands_.input = call.input->const_data_ptr<T>();
    operands_.target = call.target->const_data_ptr<T>();
    return;
  }
  operands_.source = this;
  if (call.same_order) {
    operands_.read = [](const void* self, int64_t begin, int64_t n, T* input, T* target) {
      static_cast<const OperandReader*>(self)->read_rows(begin, n, input, target);
    };
    return;
  }
  // Without an output: it would be laid out in this iterator's own order.
  iterator_ = std::make_unique<at::TensorIterator>(at::TensorIteratorConfig()
                                                       .set_check_mem_overlap(false)
                                                       .check_all_same_dtype(false)
                                                       .add_const_input(*call.input)
                                                       .add_const_input(*call.target)
                                                       .build());
  operands_.read = [](const void* self, int64_t begin, int64_t n, T* input, T* target) {
    static_cast<const OperandReader*>(self)->read_iterated(begin, n, input, target);
  };
}

template <class T>
OperandReader<T>::~OperandReader() = default;

template <class T>
void OperandReader<T>::read_rows(int64_t begin, int64_t n, T* input, T* target) const {
  copy(input, row_of(*call_.input, begin), n, 1);
  copy(target, row_of(*call_.target, begin), n, 1);
}

template <class T>
void OperandReader<T>::read_iterated(int64_t begin, int64_t n, T* input, T* target) const {
  int64_t done = 0;
  const auto loop = [&](char** data, const int64_t* strides, int64_t columns, int64_t rows) {
    const auto rows_of = [&](int k, const at::Tensor& tensor) {
      const auto item = static_cast<int64_t>(tensor.itemsize());
      return Rows{data[k], tensor.scalar_type(), strides[k] / item, strides[2 + k] / item};
    };
    copy(input + done, rows_of(0, *call_.input), columns, rows);
    copy(target + done, rows_of(1, *call_.target), columns, rows);
    done += columns * rows;
  };
  iterator_->serial_for_each(loop, {begin, begin + n});
}

template class OperandReader<float>;
template class OperandReader<double>;
template class OperandReader<at::BFloat16>;
template class OperandReader<at::Half>;

namespace {

// Shorter rows are put together first.
constexpr int64_t least_columns = 16;

// Over what stock iterates over for element-wise losses, the output first.
at::TensorIterator iterate_with_output(const LossCall& call) {
  at::Tensor output;  // undefined: laid out by the iterator
  if (loss_of(call.name).output == LossOutput::like_input) {
    output = empty_result(call.input->sizes(), call.input->strides(), call.dtype);
  }
  return at::TensorIteratorConfig()
      .set_check_mem_overlap(false)
      .check_all_same_dtype(false)
      .declare_static_dtype(call.dtype)
      .add_owned_output(output)
      .add_const_input(*call.input)
      .add_const_input(*call.target)
      .build();
}

// Into the output's memory, in its order.
template <class T>
void write_in_order(const LossCall& call, const LossKernelsOf<T>& kernels, const at::Tensor& output) {
  const OperandReader<T> operands(call);
  T* const values = output.mutable_data_ptr<T>();
  at::parallel_for(0, output.numel(), grain, [&](int64_t begin, int64_t end) {
    kernels.values(values, operands.operands(), begin, end, call.threshold);
  });
}

template <class T>
void write_by_rows(const LossCall& call, const LossKernelsOf<T>& kernels, at::TensorIterator& iterator) {
  iterator.for_each(
      [&](char** data, const int64_t* strides, int64_t columns, int64_t rows) {
        int64_t in_elements[6];
        std::transform(
            strides, strides + 6, in_elements, [](int64_t bytes) { return bytes / static_cast<int64_t>(sizeof(T)); });
        kernels.strided_values(
            reinterpret_cast<T*>(data[0]),
            reinterpret_cast<const T*>(data[1]),
            reinterpret_cast<const T*>(data[2]),
            in_elements,
            columns,
            rows,
            call.threshold);
      },
      grain);
}

}  // namespace

template <class T>
at::Tensor loss_values(const LossCall& call, const LossKernelsOf<T>& kernels) {
  const at::Tensor& input = *call.input;
  const at::Tensor& target = *call.target;
  if (C10_LIKELY(input.is_contiguous() && target.is_contiguous())) {
    const bool like_input = loss_of(call.name).output == LossOutput::like_input;
    const at::Tensor output =
        like_input ? empty_result(input.sizes(), input.strides(), call.dtype) : empty_result(input.sizes(), call.dtype);
    write_in_order(call, kernels, output);
    return output;
  }
  auto iterator = iterate_with_output(call);
  const bool casts = input.scalar_type() != call.dtype || target.scalar_type() != call.dtype;
  if (call.same_order || casts || iterator.shape()[0] < least_columns) {
    write_in_order(call, kernels, iterator.output());
  } else {
    write_by_rows(call, kernels, iterator);
  }
  return iterator.output();
}

template at::Tensor loss_values(const LossCall&, const LossKernelsOf<float>&);
template at::Tensor loss_values(const LossCall&, const LossKernelsOf<double>&);
template at::Tensor loss_values(const LossCall&, const LossKernelsOf<at::BFloat16>&);
template at::Tensor loss_values(const LossCall&, const LossKernelsOf<at::Half>&);

}  // namespace fastpatch
