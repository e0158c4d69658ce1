#include "loss_verification.h"

#include "../python_tensor.h"

namespace fastpatch {
namespace {

class HoldGil {
 public:
  HoldGil() : state_(PyGILState_Ensure()) {}
  ~HoldGil() {
    PyGILState_Release(state_);
  }
  HoldGil(const HoldGil&) = delete;
  HoldGil& operator=(const HoldGil&) = delete;

 private:
  PyGILState_STATE state_;
};

const LossTarget& target_of(LossName name) {
  for (const Target* any : all_targets()) {
    const auto* target = dynamic_cast<const LossTarget*>(any);
    if (target != nullptr && target->loss == name) {
      return *target;
    }
  }
  TORCH_INTERNAL_ASSERT(false, "no such loss");
}

PyObject* operands_of(const LossGradientCall& call) {
  return Py_BuildValue(
      "NNNLd",
      wrap(*call.grad_output),
      wrap(*call.input),
      wrap(*call.target),
      static_cast<long long>(call.reduction),
      call.threshold);
}

at::Tensor verified_gradient(const LossGradientCall& call) {
  if (!is_gradient_served(call)) {
    return loss_gradient(call);
  }
  const HoldGil gil;
  Verification verification;
  if (!verification.begin(target_of(call.name), "gradient", operands_of(call))) {
    throw_python_error();
  }
  const at::Tensor gradient = loss_gradient(call);
  if (!verification.end(wrap(gradient))) {
    throw_python_error();
  }
  return gradient;
}

}  // namespace

bool begin_verification(const LossTarget& target, LossCall* call, Verification* verification) {
  PyObject* operands = Py_BuildValue(
      "NNLd", wrap(*call->input), wrap(*call->target), static_cast<long long>(call->reduction), call->threshold);
  call->gradient = verified_gradient;
  return verification->begin(target, "value", operands);
}

}  // namespace fastpatch
