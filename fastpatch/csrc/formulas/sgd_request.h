// What is asked of an SGD update: its hyperparameters, and the memory of the parameters.
#pragma once

#include <cstdint>

#include <c10/core/ScalarType.h>

namespace fastpatch {

template <class Number>
struct SgdNumbers {
  Number weight_decay;
  Number momentum;
  Number one_minus_dampening;
  Number minus_lr;
};

struct SgdHyper {
  SgdNumbers<double> doubles;  // as Python has them
  SgdNumbers<float> floats;    // rounded by the thread that took the call: others may flush denormals
  bool decay;                  // weight_decay != 0, judged before it was rounded
  bool has_momentum;
  bool nesterov;
  bool maximize;
  bool foreach;          // all parameters take one operation after the other, not one parameter after the other
  bool chooses_foreach;  // nothing was asked for: stock does so where all parameters are on CUDA devices
  double largest;  // magnitude of what is rounded to a parameter's dtype, of which stock raises if that can't hold it
  const void* tensors[2];  // where lr and weight_decay come from, if they are tensors; else null
};

// Stock's foreach=True adds Nesterov's momentum to the gradient in place, unless it has made a new one by then.
inline bool writes_grad(const SgdHyper& hyper) {
  return hyper.foreach && hyper.has_momentum && hyper.nesterov && !hyper.decay && !hyper.maximize;
}

constexpr int sgd_on_cpu = -1;

// One parameter: n elements each, of one dtype. Without momentum, buffer is null; at its first step it is written, not
// read. grad is written only if writes_grad(hyper).
struct SgdSlice {
  char* param;
  char* grad;
  char* buffer;
  int64_t n;
  c10::ScalarType dtype;
  int device;  // a CUDA device's number, or sgd_on_cpu
  bool first;
  bool rounds_momentum;  // to the dtype, before `b * momentum`, on the CPU
};

}  // namespace fastpatch
