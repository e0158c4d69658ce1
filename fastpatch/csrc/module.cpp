// fastpatch._native: what Python sees of the compiled side.
#include <algorithm>

#include "entries/entries.h"
#include "entry.h"
#include "verification.h"

namespace fastpatch {
namespace {

PyObject* setup(PyObject*, PyObject* args) {
  PyObject* variable = nullptr;
  PyObject* error = nullptr;
  PyObject* prove = nullptr;
  PyObject* told = nullptr;
  PyObject* verify = nullptr;
  PyObject* order = nullptr;
  if (!PyArg_ParseTuple(args, "OOOOOO!", &variable, &error, &prove, &told, &verify, &PyTuple_Type, &order)) {
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(order); ++i) {
    Target* target = find_target(PyTuple_GET_ITEM(order, i));
    if (target == nullptr) {
      return nullptr;
    }
    target->index = static_cast<size_t>(i);
  }
  set_scope_variable(variable);
  set_fallback_error(error);
  set_cuda_prover(prove);
  set_first_fallback(told);
  Verification::set_verifier(verify);
  Py_RETURN_NONE;
}

PyObject* set_switch(PyObject*, PyObject* args) {
  PyObject* name = nullptr;
  long state = 0;
  if (!PyArg_ParseTuple(args, "Ol", &name, &state)) {
    return nullptr;
  }
  Target* target = find_target(name);
  if (target == nullptr) {
    return nullptr;
  }
  target->process.store(static_cast<Switch>(state));
  Py_RETURN_NONE;
}

PyObject* set_verify_rate(PyObject*, PyObject* args) {
  PyObject* name = nullptr;
  double rate = 0;
  if (!PyArg_ParseTuple(args, "Od", &name, &rate)) {
    return nullptr;
  }
  Target* target = find_target(name);
  if (target == nullptr) {
    return nullptr;
  }
  target->process_verify_rate.store(rate);
  Py_RETURN_NONE;
}

PyObject* want_verification(PyObject*, PyObject*) {
  Verification::want();
  Py_RETURN_NONE;
}

PyObject* get_switch(PyObject*, PyObject* args) {
  PyObject* name = nullptr;
  long least = static_cast<long>(Switch::off);
  if (!PyArg_ParseTuple(args, "O|l", &name, &least)) {
    return nullptr;
  }
  const Target* target = find_target(name);
  return target == nullptr ? nullptr : PyLong_FromLong(static_cast<long>(target->state(static_cast<Switch>(least))));
}

PyObject* set_least(PyObject*, PyObject* args) {
  PyObject* builtin = nullptr;
  long state = 0;
  if (!PyArg_ParseTuple(args, "O!l", &PyCFunction_Type, &builtin, &state)) {
    return nullptr;
  }
  Entry* entry = entry_of(PyCFunction_GET_SELF(builtin));
  if (entry == nullptr) {
    return nullptr;
  }
  entry->least = static_cast<Switch>(state);
  Py_RETURN_NONE;
}

PyObject* set_live(PyObject*, PyObject* args) {
  PyObject* builtin = nullptr;
  int live = 0;
  if (!PyArg_ParseTuple(args, "O!p", &PyCFunction_Type, &builtin, &live)) {
    return nullptr;
  }
  Entry* entry = entry_of(PyCFunction_GET_SELF(builtin));
  if (entry == nullptr) {
    return nullptr;
  }
  entry->live = live != 0;
  Py_RETURN_NONE;
}

PyObject* is_built_for_cuda(PyObject*, PyObject*) {
  const auto& all = all_targets();
  return PyBool_FromLong(std::any_of(all.begin(), all.end(), [](const Target* any) { return any->cuda.is_built(); }));
}

PyObject* set_proving(PyObject*, PyObject* proving) {
  CudaProofs::set_proving(proving == Py_True);
  Py_RETURN_NONE;
}

// (target, device, names of dtypes)
PyObject* set_cuda_proof(PyObject*, PyObject* args) {
  static const struct {
    const char* name;
    at::ScalarType dtype;
  } all[] = {{"float32", at::kFloat}, {"float64", at::kDouble}, {"bfloat16", at::kBFloat16}, {"float16", at::kHalf}};
  PyObject* name = nullptr;
  int device = 0;
  PyObject* names = nullptr;
  if (!PyArg_ParseTuple(args, "OiO!", &name, &device, &PyTuple_Type, &names)) {
    return nullptr;
  }
  const Target* target = find_target(name);
  if (target == nullptr) {
    return nullptr;
  }
  std::vector<at::ScalarType> dtypes;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
    for (const auto& one : all) {
      if (PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, i), one.name) == 0) {
        dtypes.push_back(one.dtype);
      }
    }
  }
  target->cuda.set(device, dtypes);
  Py_RETURN_NONE;
}

// (fast, {reason: count}) of a target.
PyObject* counts(PyObject*, PyObject* name) {
  const Target* target = find_target(name);
  PyObject* fallback = target == nullptr ? nullptr : PyDict_New();
  if (fallback == nullptr) {
    return nullptr;
  }
  for (int i = 0; i < static_cast<int>(Reason::count); ++i) {
    const int64_t count = target->fallback[i].load();
    if (count != 0) {
      PyObject* value = PyLong_FromLongLong(count);
      if (value == nullptr || PyDict_SetItemString(fallback, reason_code(static_cast<Reason>(i)), value) < 0) {
        Py_XDECREF(value);
        Py_DECREF(fallback);
        return nullptr;
      }
      Py_DECREF(value);
    }
  }
  return Py_BuildValue("LN", static_cast<long long>(target->fast.load()), fallback);
}

PyObject* fast_on_cuda(PyObject*, PyObject* name) {
  const Target* target = find_target(name);
  return target == nullptr ? nullptr : PyLong_FromLongLong(target->fast_on_cuda.load());
}

PyObject* reset_counts(PyObject*, PyObject*) {
  for (Target* target : all_targets()) {
    target->fast = 0;
    target->fast_on_cuda = 0;
    for (auto& count : target->fallback) {
      count = 0;
    }
  }
  Py_RETURN_NONE;
}

// {code: (sentence, advice)} of every reason.
PyObject* reasons(PyObject*, PyObject*) {
  PyObject* all = PyDict_New();
  for (int i = 0; all != nullptr && i < static_cast<int>(Reason::count); ++i) {
    const auto reason = static_cast<Reason>(i);
    PyObject* text = Py_BuildValue("ss", reason_text(reason), reason_advice(reason));
    if (text == nullptr || PyDict_SetItemString(all, reason_code(reason), text) < 0) {
      Py_CLEAR(all);
    }
    Py_XDECREF(text);
  }
  return all;
}

PyMethodDef methods[] = {
    {"setup",
     setup,
     METH_VARARGS,
     "Takes the context variable of scopes, the type FallbackError, what makes the proof (target, CUDA device), what "
     "is told of first fallbacks (target, reason, line), what checks calls (target, kind, *arguments), and the targets "
     "in the order of a scope's switches."},
    {"set_switch", set_switch, METH_VARARGS, "Sets a target's process-wide switch."},
    {"set_verify_rate", set_verify_rate, METH_VARARGS, "(target, rate): the process-wide share of calls to check."},
    {"want_verification", want_verification, METH_NOARGS, "From now on rates of verification are looked at."},
    {"get_switch", get_switch, METH_VARARGS, "(target[, least]): its switch, here and now."},
    {"set_least", set_least, METH_VARARGS, "(builtin, switch): one that is on by itself, and at least so."},
    {"set_live", set_live, METH_VARARGS, "Whether a patch point's builtin may serve at all."},
    {"is_built_for_cuda", is_built_for_cuda, METH_NOARGS, "Does the library have kernels for CUDA?"},
    {"set_proving", set_proving, METH_O, "Whether this thread makes a proof: every CUDA device serves it."},
    {"set_cuda_proof", set_cuda_proof, METH_VARARGS, "(target, device, dtypes): those in which it equals stock there."},
    {"counts", counts, METH_O, "(fast, {reason: count}) of a target."},
    {"fast_on_cuda", fast_on_cuda, METH_O, "How many of a target's fast units were on CUDA devices."},
    {"reset_counts", reset_counts, METH_NOARGS, "Sets all counters to zero."},
    {"reasons", reasons, METH_NOARGS, "{code: (sentence, advice)} of every reason."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition{
    PyModuleDef_HEAD_INIT,
    "fastpatch._native",
    "Compiled side of fastpatch.",
    -1,
    methods,
    nullptr,
    nullptr,
    nullptr,
    nullptr};

}  // namespace
}  // namespace fastpatch

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__native() {
  PyObject* module = PyModule_Create(&fastpatch::definition);
  for (PyMethodDef* methods : {fastpatch::loss_methods(), fastpatch::sgd_methods(), fastpatch::sgd_step_methods()}) {
    if (module != nullptr && PyModule_AddFunctions(module, methods) < 0) {
      Py_CLEAR(module);
    }
  }
  return module;
}
