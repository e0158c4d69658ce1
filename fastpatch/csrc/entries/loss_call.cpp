#include "loss_call.h"

#include <algorithm>

#include <ATen/core/Reduction.h>
#include <ATen/core/grad_mode.h>

#include "../python_tensor.h"
#include "../thread_state.h"
#include "numbers.h"

namespace fastpatch {
namespace {

Reason parse_tensors(PyObject* input, PyObject* wanted, ParsedLossCall* call) {
  call->asked.ask(LossGuard::kinds);
  if (input == nullptr || wanted == nullptr) {
    return Reason::arguments;
  }
  call->tensors[0] = input;
  call->tensors[1] = wanted;
  call->input = exact_tensor(input);
  call->target = exact_tensor(wanted);
  if (call->input != nullptr && call->target != nullptr) {
    return Reason::served;
  }
  const Reason first = call->input == nullptr ? why_not_exact(input) : Reason::served;
  return first == Reason::served ? why_not_exact(wanted) : first;
}

// The names stock takes; others ('elementwise_mean', wrong ones) warn or raise there.
bool parse_reduction(PyObject* name, int64_t* reduction) {
  static const struct {
    const char* name;
    int64_t value;
  } known[] = {{"mean", at::Reduction::Mean}, {"sum", at::Reduction::Sum}, {"none", at::Reduction::None}};
  if (!PyUnicode_CheckExact(name)) {
    return false;
  }
  for (const auto& entry : known) {
    if (PyUnicode_CompareWithASCIIString(name, entry.name) == 0) {
      *reduction = entry.value;
      return true;
    }
  }
  return false;
}

// A number above zero, or zero where the function in Python makes something of it. Stock takes a tensor without
// dimensions too.
Reason parse_threshold(PyObject* object, bool may_be_zero, LossCall* call) {
  call->asked.ask(LossGuard::threshold);
  call->threshold = 1.0;
  if (object == nullptr) {
    return Reason::served;
  }
  if (const at::Tensor* tensor = exact_tensor(object)) {
    const bool plain = check_thread() == Reason::served && check_tensor(*tensor) == Reason::served;
    if (!plain || tensor->dim() != 0 || tensor->requires_grad() || tensor->is_complex()) {
      return loss_of(call->name).bad_threshold;
    }
    call->threshold = tensor->item().toDouble();
  } else if (!is_number(object, &call->threshold)) {
    return loss_of(call->name).bad_threshold;
  }
  const bool fits = call->threshold > 0 || (may_be_zero && call->threshold == 0);
  return fits ? Reason::served : loss_of(call->name).bad_threshold;
}

PyObject* at_place(PyObject* const* bound, int place) {
  return place < 0 || bound[place] == Py_None ? nullptr : bound[place];
}

bool is_bool_or_absent(PyObject* argument) {
  return argument == nullptr || PyBool_Check(argument);
}

// As torch.nn._reduction.legacy_get_string().
int64_t legacy_reduction(const ParsedLossCall& call) {
  return call.reduce == Py_False         ? at::Reduction::None
         : call.size_average == Py_False ? at::Reduction::Sum
                                         : at::Reduction::Mean;
}

// Only stock's function in Python expands; its builtin leaves that to an operator whose backward doesn't.
Reason check_broadcast(const LossTarget& target, ParsedLossCall* call) {
  call->asked.ask(LossGuard::thread);
  Reason reason = check_thread();
  if (reason != Reason::served) {
    return reason;
  }
  call->asked.ask(LossGuard::tensors);
  for (const at::Tensor* tensor : {call->input, call->target}) {
    reason = check_tensor_anywhere(*tensor);
    if (reason != Reason::served) {
      return reason;
    }
  }
  call->asked.ask(LossGuard::shapes);
  if (target.describe_sizes == Py_None || !are_expandable(call->input->sizes(), call->target->sizes())) {
    return Reason::shape_mismatch;
  }
  const at::NoGradGuard unrecorded;
  const Expanded expanded(*call);
  LossCall of_expanded = *call;
  of_expanded.input = &expanded.input;
  of_expanded.target = &expanded.target;
  reason = check_loss(&of_expanded);
  call->asked = of_expanded.asked;
  return reason;
}

}  // namespace

Reason parse_outer_loss(const LossTarget& target, const Arguments& arguments, ParsedLossCall* call) {
  PyObject* bound[8];
  TORCH_INTERNAL_ASSERT(target.outer.size() <= 8);
  call->asked.ask(LossGuard::signature);
  if (!arguments.bind(target.outer, bound)) {
    return Reason::arguments;
  }
  if (target.weight >= 0) {
    call->asked.ask(LossGuard::weights);
    if (PyObject* weight = at_place(bound, target.weight)) {
      return exact_tensor(weight) == nullptr ? why_not_exact(weight) : Reason::weight;
    }
  }
  const Reason tensors = parse_tensors(bound[0], bound[1], call);
  if (tensors != Reason::served) {
    return tensors;
  }
  call->asked.ask(LossGuard::reduction);
  call->size_average = at_place(bound, target.size_average);
  call->reduce = at_place(bound, target.reduce);
  call->reduction = at::Reduction::Mean;
  if (call->is_legacy()) {
    const bool known = is_bool_or_absent(call->size_average) && is_bool_or_absent(call->reduce);
    if (!known || target.warn_of_legacy_arguments == Py_None) {
      return Reason::legacy_arguments;
    }
    call->reduction = legacy_reduction(*call);
  } else if (bound[target.reduction] != nullptr && !parse_reduction(bound[target.reduction], &call->reduction)) {
    return Reason::arguments;
  }
  const bool may_be_zero = loss_of(target.loss).zero == ZeroThreshold::l1;
  return parse_threshold(bound[target.threshold], may_be_zero, call);
}

Reason parse_inner_loss(const LossTarget& target, const Arguments& arguments, ParsedLossCall* call) {
  PyObject* bound[4];
  call->asked.ask(LossGuard::signature);
  if (!arguments.bind(target.inner, bound)) {
    return Reason::arguments;
  }
  const Reason tensors = parse_tensors(bound[0], bound[1], call);
  if (tensors != Reason::served) {
    return tensors;
  }
  call->asked.ask(LossGuard::reduction);
  // Without a reduction the builtin does not take its documented default; nobody calls it so.
  if (bound[2] == nullptr || !PyLong_CheckExact(bound[2])) {
    return Reason::arguments;
  }
  call->reduction = PyLong_AsLong(bound[2]);
  if (call->reduction < at::Reduction::None || call->reduction > at::Reduction::Sum) {
    PyErr_Clear();  // a number too large for a long
    return Reason::arguments;
  }
  return parse_threshold(bound[3], /*may_be_zero=*/false, call);
}

bool are_expandable(at::IntArrayRef a, at::IntArrayRef b) {
  for (size_t i = 1; i <= std::min(a.size(), b.size()); ++i) {
    const int64_t one = a[a.size() - i];
    const int64_t other = b[b.size() - i];
    if (one != other && one != 1 && other != 1) {
      return false;
    }
  }
  return true;
}

Expanded::Expanded(const LossCall& call) {
  const at::IntArrayRef a = call.input->sizes(), b = call.target->sizes();
  auto sizes = a.size() < b.size() ? b.vec() : a.vec();
  const at::IntArrayRef shorter = a.size() < b.size() ? a : b;
  for (size_t i = 1; i <= shorter.size(); ++i) {
    int64_t& size = sizes[sizes.size() - i];
    size = size == 1 ? shorter[shorter.size() - i] : size;
  }
  input = call.input->sizes() == sizes ? *call.input : call.input->expand(sizes);
  target = call.target->sizes() == sizes ? *call.target : call.target->expand(sizes);
}

namespace {

Reason judge(LossParse parse, const LossTarget& target, const Arguments& arguments, ParsedLossCall* call) {
  *call = {};
  call->name = target.loss;
  const Reason reason = parse(target, arguments, call);
  if (reason != Reason::served) {
    return reason;
  }
  return C10_UNLIKELY(parse == parse_outer_loss && call->broadcasts()) ? check_broadcast(target, call)
                                                                       : check_loss(call);
}

}  // namespace

Reason judge_loss(LossParse parse, const LossTarget& target, const Arguments& arguments, ParsedLossCall* call) {
  Reason reason = judge(parse, target, arguments, call);
  while (C10_UNLIKELY(reason == Reason::cuda_unproven) && target.prove_on_cuda()) {
    reason = judge(parse, target, arguments, call);
  }
  return reason;
}

}  // namespace fastpatch
