// The loops of cpu/loss_kernels.h over the formula of one loss.
#pragma once

#include "cascade_sum.h"
#include "loss_kernels.h"

namespace fastpatch::CPU_CAPABILITY {

// The losses of operands in memory, computed where they are asked for.
template <class T, class Formula>
struct Losses {
  const T* input;
  const T* target;
  const Formula& formula;

  T number(int64_t i) const {
    return formula(input[i], target[i]);
  }
  template <int count>
  C10_ALWAYS_INLINE auto vectors(int64_t i) const {
    using V = typename Formula::V;
    constexpr int64_t width = Vec<T>::size();
    std::array<V, count> lanes;
    for (int k = 0; k < count; ++k) {
      lanes[k] = formula(Lanes<V>::load(input + i + k * width), Lanes<V>::load(target + i + k * width));
    }
    return lanes;
  }
};

template <class T, class Formula>
void values_of(T* output, const T* input, const T* target, int64_t n, const Formula& formula) {
  using V = typename Formula::V;
  constexpr int64_t width = Vec<T>::size();
  int64_t i = 0;
  for (; i + width <= n; i += width) {
    const V loss = formula(Lanes<V>::load_elementwise(input + i), Lanes<V>::load_elementwise(target + i));
    Lanes<V>::store_elementwise(loss, output + i);
  }
  for (; i < n; ++i) {
    output[i] = formula(input[i], target[i]);
  }
}

constexpr int64_t staged_block = 2048;

// Losses of operands that are elsewhere: those of a block at a time, in memory close by. It knows no formula, so that
// the sum over it, which takes long to compile, is the same for all losses.
template <class T>
class StagedLosses {
 public:
  // output[i] = loss(input[i], target[i])
  using Values = void (*)(T* output, const T* input, const T* target, int64_t n, double threshold);

  StagedLosses(const LossOperands<T>& operands, int64_t begin, int64_t end, double threshold, Values values)
      : operands_(operands), begin_(begin), n_(end - begin), threshold_(threshold), values_(values) {}

  T number(int64_t i) const {
    return at(i, 1).number(0);
  }
  template <int count>
  auto vectors(int64_t i) const {
    return at(i, count * Vec<T>::size()).template vectors<count>(0);
  }

 private:
  // Elements [i, i + count), at most half a block; i must not decrease from call to call.
  InMemory<T> at(int64_t i, int64_t count) const {
    if (i + count > first_ + filled_) {
      fill(i);
    }
    return {losses_ + (i - first_)};
  }

  void fill(int64_t i) const {
    T input[staged_block];
    T target[staged_block];
    first_ = i;
    filled_ = std::min(staged_block, n_ - i);
    operands_.read(operands_.source, begin_ + i, filled_, input, target);
    values_(losses_, input, target, filled_, threshold_);
  }

  const LossOperands<T>& operands_;
  int64_t begin_;
  int64_t n_;
  double threshold_;
  Values values_;
  mutable int64_t first_ = 0;
  mutable int64_t filled_ = 0;
  mutable T losses_[staged_block];
};

template <class T, class Order>
typename Order::Sum staged_sum(const StagedLosses<T>& losses, int64_t n) {
  return cascade_row_sum<Order>(n, losses);
}

template <class Loss, class T, class Order>
typename Order::Sum loss_sum(const LossOperands<T>& operands, int64_t begin, int64_t end, double threshold) {
  using Formula = typename Loss::template Value<T>;
  if (operands.read == nullptr) {
    const Formula formula(threshold);
    const Losses<T, Formula> losses{operands.input + begin, operands.target + begin, formula};
    return cascade_row_sum<Order>(end - begin, losses);
  }
  const auto values = [](T* output, const T* input, const T* target, int64_t n, double number) {
    values_of(output, input, target, n, Formula(number));
  };
  return staged_sum<T, Order>({operands, begin, end, threshold, values}, end - begin);
}

template <class T>
typename Whole<T>::Sum row_sum(const T* values, int64_t n) {
  return cascade_row_sum<Whole<T>>(n, InMemory<T>{values});
}

template <class Loss, class T>
void loss_values(T* output, const LossOperands<T>& operands, int64_t begin, int64_t end, double threshold) {
  const typename Loss::template Value<T> formula(threshold);
  if (operands.read == nullptr) {
    return values_of(output + begin, operands.input + begin, operands.target + begin, end - begin, formula);
  }
  T input[staged_block];
  T target[staged_block];
  for (int64_t i = begin; i < end; i += staged_block) {
    const int64_t n = std::min(staged_block, end - i);
    operands.read(operands.source, i, n, input, target);
    values_of(output + i, input, target, n, formula);
  }
}

template <class V, class T>
C10_ALWAYS_INLINE V load_strided(const T* from, int64_t stride) {
  if (stride == 1) {
    return Lanes<V>::load(from);
  }
  if (stride == 0) {
    return V(static_cast<typename Lanes<V>::Number>(*from));
  }
  T numbers[Vec<T>::size()];
  for (int64_t k = 0; k < Vec<T>::size(); ++k) {
    numbers[k] = from[k * stride];
  }
  return Lanes<V>::load(numbers);
}

template <class Loss, class T>
void strided_loss_values(
    T* output,
    const T* input,
    const T* target,
    const int64_t* strides,
    int64_t columns,
    int64_t rows,
    double threshold) {
  const typename Loss::template Value<T> formula(threshold);
  using V = typename std::decay_t<decltype(formula)>::V;
  constexpr int64_t width = Vec<T>::size();
  const int64_t out = strides[0], in = strides[1], wanted = strides[2];
  for (int64_t row = 0; row < rows; ++row) {
    int64_t i = 0;
    for (; out == 1 && i + width <= columns; i += width) {
      const V first = load_strided<V>(input + i * in, in);
      Lanes<V>::store(formula(first, load_strided<V>(target + i * wanted, wanted)), output + i);
    }
    for (; i < columns; ++i) {
      output[i * out] = formula(input[i * in], target[i * wanted]);
    }
    output += strides[3], input += strides[4], target += strides[5];
  }
}

template <class T, bool one_grad_output, class Formula>
void gradient_with(
    T* grad_input, const T* input, const T* target, const T* grad_output, int64_t n, const Formula& formula) {
  using V = typename Formula::V;
  constexpr int64_t width = Vec<T>::size();
  const V common(static_cast<typename Lanes<V>::Number>(grad_output[0]));
  const auto at = [&](int64_t i) {
    const V grad = one_grad_output ? common : Lanes<V>::load_elementwise(grad_output + i);
    return formula(Lanes<V>::load_elementwise(input + i), Lanes<V>::load_elementwise(target + i), grad);
  };
  int64_t i = 0;
  for (; i + 2 * width <= n; i += 2 * width) {
    const V first = at(i);
    const V second = at(i + width);
    Lanes<V>::store_elementwise(first, grad_input + i);
    Lanes<V>::store_elementwise(second, grad_input + i + width);
  }
  for (; i < n; ++i) {
    grad_input[i] = formula(input[i], target[i], grad_output[one_grad_output ? 0 : i]);
  }
}

template <class Loss, class T>
void loss_gradient(
    T* grad_input,
    const T* input,
    const T* target,
    const T* grad_output,
    bool one_grad_output,
    int64_t n,
    double norm,
    double threshold) {
  const typename Loss::template Gradient<T> formula(norm, threshold);
  if (one_grad_output) {
    gradient_with<T, true>(grad_input, input, target, grad_output, n, formula);
  } else {
    gradient_with<T, false>(grad_input, input, target, grad_output, n, formula);
  }
}

template <class Loss, class T>
constexpr LossKernelsOf<T> kernels_of() {
  LossKernelsOf<T> kernels{
      loss_sum<Loss, T, Whole<T>>, nullptr, row_sum<T>, loss_values<Loss, T>, strided_loss_values<Loss, T>, nullptr};
  if constexpr (is_reduced<T>) {
    kernels.sum_in_float = loss_sum<Loss, T, CastToFloat<T>>;
  }
  if constexpr (requires { typename Loss::template Gradient<T>; }) {
    kernels.gradient = loss_gradient<Loss, T>;
  }
  return kernels;
}

template <class Loss>
constexpr LossKernels loss_kernels() {
  return {
      kernels_of<Loss, float>(),
      kernels_of<Loss, double>(),
      kernels_of<Loss, c10::BFloat16>(),
      kernels_of<Loss, c10::Half>()};
}

}  // namespace fastpatch::CPU_CAPABILITY
