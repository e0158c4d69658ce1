// The operands of a loss as its kernels take them, in whatever layout and dtype they are.
#pragma once

#include <memory>

#include "losses.h"

namespace at {
struct TensorIterator;
}

namespace fastpatch {

// May the operands' memory be read, and in which order?
Reason check_loss_order(LossCall* call);

// The elements of both operands in the order in which stock's element-wise losses lie in memory: straight from there,
// or copied a block at a time where dtype or order differ.
template <class T>
class OperandReader {
 public:
  explicit OperandReader(const LossCall& call);
  ~OperandReader();
  OperandReader(const OperandReader&) = delete;
  OperandReader& operator=(const OperandReader&) = delete;

  const LossOperands<T>& operands() const {
    return operands_;
  }

 private:
  void read_rows(int64_t begin, int64_t n, T* input, T* target) const;
  void read_iterated(int64_t begin, int64_t n, T* input, T* target) const;

  const LossCall& call_;
  std::unique_ptr<at::TensorIterator> iterator_;
  LossOperands<T> operands_;
};

// The element-wise losses, laid out as stock lays them out.
template <class T>
at::Tensor loss_values(const LossCall& call, const LossKernelsOf<T>& kernels);

}  // namespace fastpatch
