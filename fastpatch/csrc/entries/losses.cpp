// Python calls of the losses: torch.nn.functional.<loss> (outer) and torch._C._nn.<loss> (inner).
#include <algorithm>

#include "../python_tensor.h"
#include "../release_gil.h"
#include "../result_memory.h"
#include "../thread_state.h"
#include "entries.h"
#include "loss_call.h"
#include "loss_verification.h"

namespace fastpatch {
namespace {

#define FASTPATCH_LIST(...) {__VA_ARGS__}
#define FASTPATCH_TARGET(name, node, threshold, stub, output, zero, parameters) \
  LossTarget name##_target(LossName::name, #name, FASTPATCH_LIST parameters, #threshold);
FASTPATCH_LOSSES(FASTPATCH_TARGET)
#undef FASTPATCH_TARGET
#undef FASTPATCH_LIST

// As if stock's function warned: of the line that called it.
bool warn_of_broadcast(const LossTarget& target, const ParsedLossCall& call) {
  PyObject* text = PyObject_CallFunctionObjArgs(target.describe_sizes, call.tensors[0], call.tensors[1], nullptr);
  const char* message = text == nullptr ? nullptr : PyUnicode_AsUTF8(text);
  const bool done = message != nullptr && PyErr_WarnEx(PyExc_UserWarning, message, 1) == 0;
  Py_XDECREF(text);
  return done;
}

// Stock's own warning, as if its own function in Python gave it.
bool warn_of_legacy_arguments(const LossTarget& target, const ParsedLossCall& call) {
  PyObject* const size_average = call.size_average == nullptr ? Py_None : call.size_average;
  PyObject* const reduce = call.reduce == nullptr ? Py_None : call.reduce;
  PyObject* done = PyObject_CallFunctionObjArgs(target.warn_of_legacy_arguments, size_average, reduce, nullptr);
  Py_XDECREF(done);
  return done != nullptr;
}

// Below so many elements the call is over before another thread could use the GIL.
constexpr int64_t release_gil_from = 16384;

// Those that stock gives before it computes, in its order.
bool warn(const LossTarget& target, const ParsedLossCall& call) {
  return (!call.broadcasts() || warn_of_broadcast(target, call)) &&
         (!call.is_legacy() || warn_of_legacy_arguments(target, call));
}

// Serves; or finds a reason not to, after all; or returns nullptr with an error set.
PyObject* serve(const ParsedLossCall& parsed, LossTarget& target, Switch state, Reason* reason) {
  at::Tensor input = *parsed.input;
  at::Tensor wanted = *parsed.target;
  LossCall call = parsed;
  call.input = &input;
  call.target = &wanted;
  const bool recorded = is_recorded(input, wanted);
  if (C10_UNLIKELY(parsed.broadcasts() || parsed.is_legacy())) {
    if (!warn(target, parsed)) {
      return nullptr;
    }
    if (!are_expandable(input.sizes(), wanted.sizes())) {
      *reason = Reason::shape_mismatch;
      return nullptr;
    }
    {
      const ReleaseGil release(recorded);
      const Expanded expanded(call);
      input = expanded.input;
      wanted = expanded.target;
    }
    *reason = check_loss(&call);  // whoever handles warnings may have done anything
    if (*reason != Reason::served) {
      return nullptr;
    }
  }
  Verification verification;
  if (Verification::is_drawn(target, state)) {
    if (!begin_verification(target, &call, &verification)) {
      return nullptr;
    }
    *reason = check_loss(&call);
    if (*reason != Reason::served) {
      return nullptr;
    }
  }
  at::Tensor output;
  {
    // A launch waits while a device's queue is full, perhaps for another thread's kernels.
    const ReleaseGil release(recorded || input.numel() >= release_gil_from || input.is_cuda());
    output = loss(call);
  }
  target.count_fast(state, 1, input.is_cuda() ? 1 : 0);
  Owned result(wrap(output));
  const bool done = !verification || verification.end(Py_XNewRef(result.get()));
  return done ? result.release() : nullptr;
}

PyObject* travel(PyObject* self, const Arguments& arguments, LossParse parse, bool outer) {
  const Entry* entry = entry_of(self);
  if (entry == nullptr) {
    return nullptr;
  }
  auto& target = static_cast<LossTarget&>(*entry->target);
  const Switch state = entry->state();
  // A mode takes the call before any tensor is looked at, and comes back here if it calls on.
  if (state == Switch::off || in_torch_function_mode() || (!outer && PassInner::take(target))) {
    return arguments.call(entry->stock);
  }
  ParsedLossCall call{};
  Reason reason = Reason::served;
  try {
    reason = judge_loss(parse, target, arguments, &call);
    if (reason == Reason::served) {
      PyObject* output = serve(call, target, state, &reason);
      if (reason == Reason::served) {
        return output;
      }
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
  return travel(self, {args, keywords}, parse_outer_loss, true);
}

PyObject* inner(PyObject* self, PyObject* args, PyObject* keywords) {
  return travel(self, {args, keywords}, parse_inner_loss, false);
}

LossTarget* find_loss(PyObject* name) {
  Target* const target = find_target(name);
  auto* const found = dynamic_cast<LossTarget*>(target);
  if (target != nullptr && found == nullptr) {
    PyErr_Format(PyExc_ValueError, "%R is not a loss", name);
  }
  return found;
}

// The first argument names the loss, the others are the call's.
PyObject* explain_with(LossParse parse, PyObject* args, PyObject* keywords) {
  if (PyTuple_GET_SIZE(args) == 0) {
    PyErr_SetString(PyExc_TypeError, "the name of a loss is missing");
    return nullptr;
  }
  const LossTarget* target = find_loss(PyTuple_GET_ITEM(args, 0));
  PyObject* rest = target == nullptr ? nullptr : PyTuple_GetSlice(args, 1, PyTuple_GET_SIZE(args));
  if (rest == nullptr) {
    return nullptr;
  }
  PyObject* answer = nullptr;
  ParsedLossCall call{};
  try {
    const Reason reason = judge_loss(parse, *target, {rest, keywords}, &call);
    answer = PyErr_Occurred() ? nullptr : Py_BuildValue("siI", reason_code(reason), call.asked.last, call.asked.guards);
  } catch (...) {
    raise_current_exception();
  }
  Py_DECREF(rest);
  return answer;
}

PyObject* explain_outer(PyObject*, PyObject* args, PyObject* keywords) {
  return explain_with(parse_outer_loss, args, keywords);
}

PyObject* explain_inner(PyObject*, PyObject* args, PyObject* keywords) {
  return explain_with(parse_inner_loss, args, keywords);
}

bool may_give(const LossTarget& target, Reason reason) {
  return reason == Reason::weight                            ? target.weight >= 0
         : reason == Reason::legacy_arguments                ? target.size_average >= 0
         : reason == Reason::beta || reason == Reason::delta ? reason == loss_of(target.loss).bad_threshold
                                                             : true;
}

PyObject* guards(PyObject*, PyObject* name) {
  const LossTarget* target = find_loss(name);
  if (target == nullptr) {
    return nullptr;
  }
  using enum Reason;
  std::vector<GuardLine> lines{FASTPATCH_LOSS_GUARDS(FASTPATCH_GUARD_LINE)};
  for (GuardLine& line : lines) {
    std::erase_if(line.reasons, [target](Reason reason) { return !may_give(*target, reason); });
  }
  if (target->weight < 0) {
    lines[static_cast<size_t>(LossGuard::weights)].reasons.clear();  // never asked
  }
  return table_of_guards(lines);
}

PyObject* set_warnings(PyObject*, PyObject* args) {
  PyObject* name = nullptr;
  PyObject* legacy = nullptr;
  PyObject* sizes = nullptr;
  if (!PyArg_ParseTuple(args, "OOO", &name, &legacy, &sizes)) {
    return nullptr;
  }
  LossTarget* target = find_loss(name);
  if (target == nullptr) {
    return nullptr;
  }
  Py_INCREF(legacy);  // for the life of the process
  Py_INCREF(sizes);
  target->warn_of_legacy_arguments = legacy;
  target->describe_sizes = sizes;
  Py_RETURN_NONE;
}

PyObject* register_node(PyObject*, PyObject* args) {
  PyObject* name = nullptr;
  PyObject* type = nullptr;
  if (!PyArg_ParseTuple(args, "OO!", &name, &PyType_Type, &type)) {
    return nullptr;
  }
  const LossTarget* target = find_loss(name);
  if (target == nullptr) {
    return nullptr;
  }
  Py_INCREF(type);  // autograd keeps it for the life of the process
  show_node_as(loss_node(target->loss), reinterpret_cast<PyTypeObject*>(type));
  Py_RETURN_NONE;
}

PyObject* keep_memory(PyObject*, PyObject* args) {
  PyObject* name = nullptr;
  int keep = 0;
  if (!PyArg_ParseTuple(args, "Op", &name, &keep)) {
    return nullptr;
  }
  LossTarget* target = find_loss(name);
  if (target == nullptr) {
    return nullptr;
  }
  target->keeps_memory = keep != 0;
  const auto& all = all_targets();
  keep_result_memory(std::any_of(all.begin(), all.end(), [](const Target* any) {
    const auto* other = dynamic_cast<const LossTarget*>(any);
    return other != nullptr && other->keeps_memory;
  }));
  Py_RETURN_NONE;
}

PyObject* kept_memory(PyObject*, PyObject*) {
  return PyLong_FromLongLong(kept_result_memory());
}

PyMethodDef outer_definition{"loss", as_function(outer), METH_VARARGS | METH_KEYWORDS, nullptr};
PyMethodDef inner_definition{"loss", as_function(inner), METH_VARARGS | METH_KEYWORDS, nullptr};

PyObject* make_loss_entry(PyMethodDef* definition, PyObject* args) {
  PyObject* name = nullptr;
  PyObject* stock = nullptr;
  if (!PyArg_ParseTuple(args, "OO", &name, &stock)) {
    return nullptr;
  }
  LossTarget* target = find_loss(name);
  return target == nullptr ? nullptr : make_entry(definition, stock, target);
}

PyObject* outer_entry(PyObject*, PyObject* args) {
  return make_loss_entry(&outer_definition, args);
}

PyObject* inner_entry(PyObject*, PyObject* args) {
  return make_loss_entry(&inner_definition, args);
}

PyMethodDef methods[] = {
    {"loss_outer", outer_entry, METH_VARARGS, "(loss, stock): a builtin to stand in for torch.nn.functional's."},
    {"loss_inner", inner_entry, METH_VARARGS, "(loss, stock): a builtin to stand in for torch._C._nn's."},
    {"loss_explain",
     as_function(explain_outer),
     METH_VARARGS | METH_KEYWORDS,
     "(reason, last guard, bits of those asked) for a call of a loss of torch.nn.functional; 'served' if it would be."},
    {"loss_explain_inner",
     as_function(explain_inner),
     METH_VARARGS | METH_KEYWORDS,
     "The same with the arguments of torch._C._nn's."},
    {"loss_guards", guards, METH_O, "The loss's guards in order: ((question, codes), ...); no codes: never asked."},
    {"loss_register_node", register_node, METH_VARARGS, "(loss, type): shows its autograd node as this grad_fn type."},
    {"loss_set_warnings",
     set_warnings,
     METH_VARARGS,
     "(loss, warn, describe): warn(size_average, reduce) gives stock's warning, describe(input, target) the text of "
     "that of different sizes; None where there is none."},
    {"loss_keep_memory", keep_memory, METH_VARARGS, "(loss, keep): whether it wants memory of large results kept."},
    {"loss_kept_memory", kept_memory, METH_NOARGS, "Bytes of it that are kept now."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

PyMethodDef* loss_methods() {
  return methods;
}

}  // namespace fastpatch
