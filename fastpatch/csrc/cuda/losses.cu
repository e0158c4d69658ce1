#include "losses.h"

#include "../formulas/huber_loss.h"
#include "../formulas/l1_loss.h"
#include "../formulas/smooth_l1_loss.h"
#include "launch.h"
#include "loss_kernels.h"

namespace fastpatch::cuda {

static_assert(most_blocks <= loss_threads, "one block's threads take a partial sum each");

namespace launches {  // named: nvcc can't start kernels of an anonymous namespace's types

Operands operands_of(const LossRows& rows) {
  const auto aligned = [&](const void* row, c10::ScalarType type) {
    const auto width = static_cast<int64_t>(vector_bytes / c10::elementSize(rows.type));
    return is_aligned(row, width * static_cast<int64_t>(c10::elementSize(type)));
  };
  return {
      rows.input,
      rows.target,
      rows.input_type,
      rows.target_type,
      rows.n,
      aligned(rows.input, rows.input_type) && aligned(rows.target, rows.target_type)};
}

bool is_mixed(const LossRows& rows) {
  return rows.input_type != rows.type || rows.target_type != rows.type;
}

template <template <class> class Formula, class T>
void values(const LossRows& rows, void* output) {
  Operands in = operands_of(rows);
  in.aligned = in.aligned && is_aligned(output, vector_bytes);
  const Formula<T> formula(rows.threshold, 1.0);
  const int64_t blocks = elementwise_blocks<T>(rows.n);
  const OnDevice device(rows.device);
  if constexpr (std::is_same_v<T, float>) {
    if (is_mixed(rows)) {
      return device.launch(
          values_kernel<Formula<T>, T, true>, blocks, loss_threads, in, static_cast<T*>(output), formula);
    }
  }
  device.launch(values_kernel<Formula<T>, T, false>, blocks, loss_threads, in, static_cast<T*>(output), formula);
}

template <template <class> class Formula, class T>
void reduced(const LossRows& rows, bool mean, void* partials, void* output) {
  const Operands in = operands_of(rows);
  const Formula<T> formula(rows.threshold, 1.0);
  const int64_t blocks = blocks_of_sum(rows.n);
  const auto divisor = static_cast<Opmath<T>>(mean ? rows.n : 1);
  auto* const sums = static_cast<Opmath<T>*>(partials);
  auto* const result = static_cast<T*>(output);
  const OnDevice device(rows.device);
  auto* kernel = &sum_kernel<Formula<T>, T, false>;
  if constexpr (std::is_same_v<T, float>) {
    kernel = is_mixed(rows) ? &sum_kernel<Formula<T>, T, true> : kernel;
  }
  device.launch(kernel, blocks, loss_threads, in, sums, result, divisor, formula);
  if (blocks > 1) {
    device.launch(total_kernel<T>, 1, loss_threads, static_cast<const Opmath<T>*>(sums), blocks, result, divisor);
  }
}

template <template <class> class Formula, class T>
void gradient(const LossRows& rows, const void* grad_output, bool one_grad_output, bool mean, void* grad_input) {
  Operands in = operands_of(rows);
  in.aligned =
      in.aligned && is_aligned(grad_input, vector_bytes) && (one_grad_output || is_aligned(grad_output, vector_bytes));
  const Formula<T> formula(rows.threshold, mean ? 1.0 / static_cast<double>(rows.n) : 1.0);
  const OnDevice device(rows.device);
  device.launch(
      gradient_kernel<Formula<T>, T>,
      elementwise_blocks<T>(rows.n),
      loss_threads,
      in,
      static_cast<const T*>(grad_output),
      one_grad_output,
      static_cast<T*>(grad_input),
      formula);
}

// Calls function<T>() for what is computed in.
#define FASTPATCH_BY_TYPE(type, function, ...)              \
  switch (type) {                                           \
    case c10::ScalarType::Double:                           \
      return function<Formula, double>(__VA_ARGS__);        \
    case c10::ScalarType::BFloat16:                         \
      return function<Formula, c10::BFloat16>(__VA_ARGS__); \
    case c10::ScalarType::Half:                             \
      return function<Formula, c10::Half>(__VA_ARGS__);     \
    default: /* the guards let no other pass */             \
      return function<Formula, float>(__VA_ARGS__);         \
  }

template <template <class> class Formula>
void values_by_type(const LossRows& rows, void* output) {
  FASTPATCH_BY_TYPE(rows.type, values, rows, output)
}

template <template <class> class Formula>
void reduced_by_type(const LossRows& rows, bool mean, void* partials, void* output) {
  FASTPATCH_BY_TYPE(rows.type, reduced, rows, mean, partials, output)
}

template <template <class> class Formula>
void gradient_by_type(
    const LossRows& rows, const void* grad_output, bool one_grad_output, bool mean, void* grad_input) {
  FASTPATCH_BY_TYPE(rows.type, gradient, rows, grad_output, one_grad_output, mean, grad_input)
}
#undef FASTPATCH_BY_TYPE

template <class Formula>
concept HasGradient = requires(const Formula& formula) { formula.gradient(0, 0, 0); };

template <template <class> class Formula>
LossKernels all() {
  LossKernels kernels{values_by_type<Formula>, reduced_by_type<Formula>, nullptr};
  if constexpr (HasGradient<Formula<float>>) {
    kernels.gradient = gradient_by_type<Formula>;
  }
  return kernels;
}

}  // namespace launches

#define FASTPATCH_DEFINE(name, Formula) \
  LossKernels name##_kernels() {        \
    return launches::all<Formula>();    \
  }
FASTPATCH_LOSS_FORMULAS(FASTPATCH_DEFINE)
#undef FASTPATCH_DEFINE

}  // namespace fastpatch::cuda
