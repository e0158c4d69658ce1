// Which optimizers' steps do what stock's does, and which hooks watch them.
#include "optimizer.h"
#include "optimizer_facts.h"

namespace fastpatch {
namespace {

OptimizerFacts facts;
PyObject* expected_sgd = nullptr;

// Would stock's step call stock's functions? Somebody may have replaced them since.
bool calls_stock() {
  return expected_sgd != nullptr && get(facts.globals, names().sgd) == expected_sgd && loop_is_stock();
}

// SGD's own, or what torch._dynamo put in its place (the same, not to be compiled) when something was compiled.
bool is_stock_init_group(PyObject* function) {
  static PyObject* accepted = nullptr;  // a wrapper seen before
  if (function == facts.init_group || (function != nullptr && function == accepted)) {
    return true;
  }
  if (function == nullptr) {
    return false;
  }
  const Owned original(PyObject_GetAttrString(function, "_torchdynamo_orig_callable"));
  if (!original) {
    PyErr_Clear();
    return false;
  }
  if (original.get() == facts.init_group) {
    Py_XSETREF(accepted, Py_NewRef(function));
    return true;
  }
  return false;
}

bool set_type(PyObject* dict, const char* name, PyTypeObject** type) {
  PyObject* value = PyDict_GetItemString(dict, name);
  if (value == nullptr || !PyType_Check(value)) {
    PyErr_Format(PyExc_TypeError, "sgd_setup: no type under '%s'", name);
    return false;
  }
  *type = reinterpret_cast<PyTypeObject*>(Py_NewRef(value));
  return true;
}

bool set_object(PyObject* dict, const char* name, PyObject** object) {
  PyObject* value = PyDict_GetItemString(dict, name);
  if (value == nullptr) {
    PyErr_Format(PyExc_KeyError, "sgd_setup: nothing under '%s'", name);
    return false;
  }
  *object = Py_NewRef(value);
  return true;
}

}  // namespace

const OptimizerFacts& optimizer_facts() {
  return facts;
}

bool set_optimizer_facts(PyObject* dict) {
  if (!PyDict_Check(dict)) {
    PyErr_SetString(PyExc_TypeError, "sgd_setup: expected a dict");
    return false;
  }
  PyObject* hash_is_id = PyDict_GetItemString(dict, "hash_is_id");
  facts.hash_is_id = hash_is_id == Py_True;
  return set_type(dict, "SGD", &facts.sgd) && set_type(dict, "defaultdict", &facts.defaultdict) &&
         set_object(dict, "init_group", &facts.init_group) && set_object(dict, "step_code", &facts.step_code) &&
         set_object(dict, "global_pre_hooks", &facts.global_pre_hooks) &&
         set_object(dict, "global_post_hooks", &facts.global_post_hooks) &&
         set_object(dict, "eval_frame_callback", &facts.eval_frame_callback) &&
         set_object(dict, "globals", &facts.globals) && set_object(dict, "single_tensor", &facts.single_tensor);
}

bool loop_is_stock() {
  return get(facts.globals, names()._single_tensor_sgd) == facts.single_tensor;
}

bool is_compiling() {
  const Owned callback(PyObject_CallNoArgs(facts.eval_frame_callback));
  if (!callback) {
    PyErr_Clear();
  }
  return callback && callback.get() != Py_None;  // False: only frames compiled before run compiled
}

void expect_sgd(PyObject* proxy) {
  expected_sgd = proxy == Py_None ? nullptr : proxy;  // its patch point keeps it alive
}

const Names& names() {
  static const Names made;
  return made;
}

Owned instance_dict(PyObject* self) {
  PyObject* dict = PyObject_GenericGetDict(self, nullptr);
  if (dict == nullptr) {
    PyErr_Clear();
  }
  return Owned(dict);
}

Reason check_optimizer(PyObject* self, bool is_explicit, Asked* asked) {
  PyTypeObject* type = Py_TYPE(self);
  if (facts.sgd == nullptr || !PyType_IsSubtype(type, facts.sgd) || type->tp_getattro != PyObject_GenericGetAttr) {
    return Reason::optimizer;
  }
  if (is_explicit ? !loop_is_stock() : !calls_stock()) {
    return Reason::optimizer;
  }
  const Names& n = names();
  const Owned dict = instance_dict(self);
  if (!dict || !is_stock_init_group(_PyType_Lookup(type, n._init_group)) || get(dict.get(), n._init_group) != nullptr) {
    return Reason::optimizer;
  }
  for (PyObject* name : {n.param_groups, n.state, n.defaults, n.grad_scale, n.found_inf}) {
    if (_PyType_Lookup(type, name) != nullptr) {
      return Reason::optimizer;  // a property or default of a subclass: instance attributes alone don't tell
    }
  }
  asked->ask(SgdGuard::scaling);
  for (PyObject* name : {n.grad_scale, n.found_inf}) {
    PyObject* value = get(dict.get(), name);
    if (value != nullptr && value != Py_None) {
      return Reason::grad_scale;
    }
  }
  asked->ask(SgdGuard::recording);
  PyObject* defaults = get(dict.get(), n.defaults);
  PyObject* differentiable =
      defaults != nullptr && PyDict_CheckExact(defaults) ? get(defaults, n.differentiable) : nullptr;
  return differentiable == Py_False ? Reason::served : Reason::differentiable;
}

bool has_hooks(PyObject* self) {
  const Names& n = names();
  const Owned dict = instance_dict(self);
  if (!dict || _PyType_Lookup(Py_TYPE(self), n._optimizer_step_code) != facts.step_code ||
      get(dict.get(), n._optimizer_step_code) != nullptr) {
    return true;
  }
  for (PyObject* hooks :
       {facts.global_pre_hooks,
        facts.global_post_hooks,
        get(dict.get(), n._optimizer_step_pre_hooks),
        get(dict.get(), n._optimizer_step_post_hooks)}) {
    if (hooks == nullptr || !PyDict_Check(hooks) || PyDict_Size(hooks) != 0) {
      return true;
    }
  }
  return false;
}

bool is_hooked_over(PyObject* self) {
  if (facts.sgd == nullptr || !PyType_IsSubtype(Py_TYPE(self), facts.sgd)) {
    return false;
  }
  PyObject* step = _PyType_Lookup(facts.sgd, names().step);
  return step != nullptr && PyFunction_Check(step);
}

}  // namespace fastpatch
