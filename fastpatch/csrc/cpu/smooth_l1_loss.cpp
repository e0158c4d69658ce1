#include "smooth_l1_loss.h"

#include "../formulas/smooth_l1_loss.h"
#include "cascade_sum.h"

namespace fastpatch::CPU_CAPABILITY {
namespace {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t width = Vec::size();

template <Division division>
float sum_with(const float* input, const float* target, int64_t n, float beta) {
  const SmoothL1Loss<division> formula{beta};
  return cascade_row_sum(
      n,
      [=](int64_t i) { return formula.value(input[i], target[i]); },
      [=](int64_t i) { return formula.value(Vec::loadu(input + i), Vec::loadu(target + i)); });
}

float sum(const float* input, const float* target, int64_t n, float beta) {
  switch (division_by(beta)) {
    case Division::none:
      return sum_with<Division::none>(input, target, n, beta);
    case Division::product:
      return sum_with<Division::product>(input, target, n, beta);
    default:
      return sum_with<Division::quotient>(input, target, n, beta);
  }
}

float sum_partials(const float* partials, int64_t n) {
  return cascade_row_sum(partials, n);
}

void values(float* output, const float* input, const float* target, int64_t n, float beta) {
  const SmoothL1Loss<Division::quotient> formula{beta};
  int64_t i = 0;
  for (; i + width <= n; i += width) {
    formula.value(Vec::loadu(input + i), Vec::loadu(target + i)).store(output + i);
  }
  for (; i < n; ++i) {
    output[i] = formula.value(input[i], target[i]);
  }
}

template <bool one_grad_output>
void gradient_with(
    float* grad_input,
    const float* input,
    const float* target,
    const float* grad_output,
    int64_t n,
    const SmoothL1LossGradient& formula) {
  const Vec common(grad_output[0]);
  const auto grad = [&](int64_t i) { return one_grad_output ? common : Vec::loadu(grad_output + i); };
  int64_t i = 0;
  for (; i + 2 * width <= n; i += 2 * width) {
    const Vec first = formula.value(Vec::loadu(input + i), Vec::loadu(target + i), grad(i));
    const int64_t j = i + width;
    const Vec second = formula.value(Vec::loadu(input + j), Vec::loadu(target + j), grad(j));
    first.store(grad_input + i);
    second.store(grad_input + j);
  }
  for (; i < n; ++i) {
    grad_input[i] = formula.value(input[i], target[i], grad_output[one_grad_output ? 0 : i]);
  }
}

void gradient(
    float* grad_input,
    const float* input,
    const float* target,
    const float* grad_output,
    bool one_grad_output,
    int64_t n,
    float norm,
    double beta) {
  const SmoothL1LossGradient formula{norm, beta};
  if (one_grad_output) {
    gradient_with<true>(grad_input, input, target, grad_output, n, formula);
  } else {
    gradient_with<false>(grad_input, input, target, grad_output, n, formula);
  }
}

}  // namespace

SmoothL1LossKernels smooth_l1_loss_kernels() {
  return {sum, sum_partials, values, gradient};
}

}  // namespace fastpatch::CPU_CAPABILITY
