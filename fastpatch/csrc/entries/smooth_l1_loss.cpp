// Python calls of smooth L1: torch.nn.functional.smooth_l1_loss (outer) and torch._C._nn.smooth_l1_loss (inner).
#include "../smooth_l1_loss.h"

#include <cstring>

#include <ATen/core/Reduction.h>

#include "../entry.h"
#include "../python_tensor.h"
#include "../release_gil.h"
#include "../thread_state.h"
#include "entries.h"
#include "numbers.h"

namespace fastpatch {
namespace {

Target target{"smooth_l1_loss"};

using Parse = Reason (*)(const Arguments&, SmoothL1LossCall*);

Reason parse_tensors(PyObject* input, PyObject* wanted, SmoothL1LossCall* call) {
  if (input == nullptr || wanted == nullptr) {
    return Reason::arguments;
  }
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

Reason parse_beta(PyObject* beta, double* value) {
  return beta == nullptr || check_number(beta, value) == Reason::served ? Reason::served : Reason::beta;
}

bool is_given(PyObject* argument) {
  return argument != nullptr && argument != Py_None;
}

Reason parse_outer(const Arguments& arguments, SmoothL1LossCall* call) {
  static const ParameterNames names({"input", "target", "size_average", "reduce", "reduction", "beta"}, 6);
  PyObject* bound[6];
  if (!arguments.bind(names, bound)) {
    return Reason::arguments;
  }
  const Reason tensors = parse_tensors(bound[0], bound[1], call);
  if (tensors != Reason::served) {
    return tensors;
  }
  if (is_given(bound[2]) || is_given(bound[3])) {
    return Reason::legacy_arguments;
  }
  call->reduction = at::Reduction::Mean;
  if (bound[4] != nullptr && !parse_reduction(bound[4], &call->reduction)) {
    return Reason::arguments;
  }
  call->beta = 1.0;
  return parse_beta(bound[5], &call->beta);
}

Reason parse_inner(const Arguments& arguments, SmoothL1LossCall* call) {
  static const ParameterNames names({"input", "target", "reduction", "beta"}, 4);
  PyObject* bound[4];
  if (!arguments.bind(names, bound)) {
    return Reason::arguments;
  }
  const Reason tensors = parse_tensors(bound[0], bound[1], call);
  if (tensors != Reason::served) {
    return tensors;
  }
  // Without a reduction the builtin does not take its documented default; nobody calls it so.
  if (bound[2] == nullptr || !PyLong_CheckExact(bound[2])) {
    return Reason::arguments;
  }
  call->reduction = PyLong_AsLong(bound[2]);
  if (call->reduction < at::Reduction::None || call->reduction > at::Reduction::Sum) {
    PyErr_Clear();  // a number too large for a long
    return Reason::arguments;
  }
  call->beta = 1.0;
  return parse_beta(bound[3], &call->beta);
}

Reason judge(Parse parse, const Arguments& arguments, SmoothL1LossCall* call) {
  const Reason reason = parse(arguments, call);
  return reason == Reason::served ? check_smooth_l1_loss(*call) : reason;
}

// Below so many elements the call is over before another thread could use the GIL.
constexpr int64_t release_gil_from = 16384;

PyObject* serve(const SmoothL1LossCall& call, Switch state) {
  const at::Tensor input = *call.input;
  const at::Tensor wanted = *call.target;
  at::Tensor output;
  {
    const ReleaseGil release(input.numel() >= release_gil_from);
    output = smooth_l1_loss({&input, &wanted, call.reduction, call.beta});
  }
  target.count_fast(state, 1);
  return wrap(output);
}

PyObject* travel(PyObject* self, const Arguments& arguments, Parse parse, bool outer) {
  const Entry* entry = entry_of(self);
  if (entry == nullptr) {
    return nullptr;
  }
  const Switch state = entry->live ? target.state() : Switch::off;
  // A mode takes the call before any tensor is looked at, and comes back here if it calls on.
  if (state == Switch::off || in_torch_function_mode() || (!outer && PassInner::take(target))) {
    return arguments.call(entry->stock);
  }
  SmoothL1LossCall call{};
  Reason reason = Reason::served;
  try {
    reason = judge(parse, arguments, &call);
    if (reason == Reason::served) {
      return serve(call, state);
    }
  } catch (...) {
    return raise_current_exception();
  }
  if (PyErr_Occurred()) {
    return nullptr;
  }
  if (forbids_fallback(state)) {
    return target.raise_fallback(reason);
  }
  target.count_fallback(reason, 1);
  if (!outer || reason == Reason::torch_function) {
    return arguments.call(entry->stock);  // user code comes before the inner point, if that is reached at all
  }
  const PassInner pass(target);
  return arguments.call(entry->stock);
}

PyObject* outer(PyObject* self, PyObject* args, PyObject* keywords) {
  return travel(self, {args, keywords}, parse_outer, true);
}

PyObject* inner(PyObject* self, PyObject* args, PyObject* keywords) {
  return travel(self, {args, keywords}, parse_inner, false);
}

PyObject* explain_with(Parse parse, const Arguments& arguments) {
  SmoothL1LossCall call{};
  try {
    const Reason reason = judge(parse, arguments, &call);
    return PyErr_Occurred() ? nullptr : PyUnicode_FromString(reason_code(reason));
  } catch (...) {
    return raise_current_exception();
  }
}

PyObject* explain_outer(PyObject*, PyObject* args, PyObject* keywords) {
  return explain_with(parse_outer, {args, keywords});
}

PyObject* explain_inner(PyObject*, PyObject* args, PyObject* keywords) {
  return explain_with(parse_inner, {args, keywords});
}

PyObject* register_node(PyObject*, PyObject* type) {
  if (!PyType_Check(type)) {
    PyErr_SetString(PyExc_TypeError, "smooth_l1_loss_register_node: expected the type of a grad_fn");
    return nullptr;
  }
  Py_INCREF(type);  // autograd keeps it for the life of the process
  show_node_as(smooth_l1_loss_node(), reinterpret_cast<PyTypeObject*>(type));
  Py_RETURN_NONE;
}

PyMethodDef outer_definition{"smooth_l1_loss", as_function(outer), METH_VARARGS | METH_KEYWORDS, nullptr};
PyMethodDef inner_definition{"smooth_l1_loss", as_function(inner), METH_VARARGS | METH_KEYWORDS, nullptr};

PyObject* outer_entry(PyObject*, PyObject* stock) {
  return make_entry(&outer_definition, stock);
}

PyObject* inner_entry(PyObject*, PyObject* stock) {
  return make_entry(&inner_definition, stock);
}

PyMethodDef methods[] = {
    {"smooth_l1_loss_outer", outer_entry, METH_O, "A builtin to stand in for F.smooth_l1_loss."},
    {"smooth_l1_loss_inner", inner_entry, METH_O, "A builtin to stand in for torch._C._nn.smooth_l1_loss."},
    {"smooth_l1_loss_explain",
     as_function(explain_outer),
     METH_VARARGS | METH_KEYWORDS,
     "The reason code for a call with F.smooth_l1_loss's arguments; 'served' if it would be."},
    {"smooth_l1_loss_explain_inner",
     as_function(explain_inner),
     METH_VARARGS | METH_KEYWORDS,
     "The same with the arguments of torch._C._nn.smooth_l1_loss."},
    {"smooth_l1_loss_register_node", register_node, METH_O, "Shows our autograd node as this grad_fn type."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

PyMethodDef* smooth_l1_loss_methods() {
  return methods;
}

}  // namespace fastpatch
