#include "entry.h"

#include <algorithm>
#include <cstring>

namespace fastpatch {
namespace {

constexpr const char* capsule_name = "fastpatch.entry";

PyObject* scope_variable = nullptr;
PyObject* fallback_error = nullptr;
thread_local bool pass_inner = false;

void free_entry(PyObject* capsule) {
  auto* entry = static_cast<Entry*>(PyCapsule_GetPointer(capsule, capsule_name));
  Py_DECREF(entry->stock);
  delete entry;
}

// The value of the context variable is None or a pair (switches: list of int, enclosing pair or None).
Switch scope_switch(size_t index) {
  PyObject* scope = nullptr;
  if (scope_variable == nullptr || PyContextVar_Get(scope_variable, nullptr, &scope) < 0 || scope == nullptr) {
    PyErr_Clear();
    return Switch::inherit;
  }
  Switch found = Switch::inherit;
  for (PyObject* at = scope; found == Switch::inherit && PyTuple_CheckExact(at); at = PyTuple_GET_ITEM(at, 1)) {
    PyObject* switches = PyTuple_GET_ITEM(at, 0);
    if (static_cast<Py_ssize_t>(index) < PyList_GET_SIZE(switches)) {
      found = static_cast<Switch>(PyLong_AsLong(PyList_GET_ITEM(switches, static_cast<Py_ssize_t>(index))));
    }
  }
  Py_DECREF(scope);
  return found;
}

}  // namespace

std::vector<Target*>& all_targets() {
  static std::vector<Target*> targets;
  return targets;
}

Target::Target(const char* name) : name(name) {
  all_targets().push_back(this);
}

Switch Target::state() const {
  const Switch scoped = scope_switch(index);
  return scoped == Switch::inherit ? process.load(std::memory_order_relaxed) : scoped;
}

PyObject* Target::raise_fallback(Reason reason) const {
  PyObject* error = PyObject_CallFunction(fallback_error, "sss", name, reason_code(reason), reason_text(reason));
  if (error != nullptr) {
    PyErr_SetObject(fallback_error, error);
    Py_DECREF(error);
  }
  return nullptr;
}

PyObject* make_entry(PyMethodDef* definition, PyObject* stock) {
  Py_INCREF(stock);
  PyObject* capsule = PyCapsule_New(new Entry{stock, false}, capsule_name, free_entry);
  if (capsule == nullptr) {
    return nullptr;
  }
  PyObject* builtin = PyCFunction_NewEx(definition, capsule, nullptr);
  Py_DECREF(capsule);
  return builtin;
}

Entry* entry_of(PyObject* self) {
  return static_cast<Entry*>(PyCapsule_GetPointer(self, capsule_name));
}

bool Arguments::bind(const char* const* names, int count, int max_positional, PyObject** bound) const {
  const Py_ssize_t given = PyTuple_GET_SIZE(positional);
  if (given > max_positional) {
    return false;
  }
  std::fill_n(bound, count, nullptr);
  for (Py_ssize_t i = 0; i < given; ++i) {
    bound[i] = PyTuple_GET_ITEM(positional, i);
  }
  PyObject* keyword = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t position = 0;
  while (keywords != nullptr && PyDict_Next(keywords, &position, &keyword, &value)) {
    const char* text = PyUnicode_Check(keyword) ? PyUnicode_AsUTF8(keyword) : nullptr;
    if (text == nullptr) {
      PyErr_Clear();
      return false;
    }
    int at = 0;
    while (at < count && std::strcmp(text, names[at]) != 0) {
      ++at;
    }
    if (at == count || bound[at] != nullptr) {
      return false;
    }
    bound[at] = value;
  }
  return true;
}

PassInner::PassInner() : saved_(pass_inner) {
  pass_inner = true;
}

PassInner::~PassInner() {
  pass_inner = saved_;
}

bool PassInner::take() {
  const bool pass = pass_inner;
  pass_inner = false;
  return pass;
}

void set_scope_variable(PyObject* variable) {
  Py_INCREF(variable);
  Py_XSETREF(scope_variable, variable);
}

void set_fallback_error(PyObject* type) {
  Py_INCREF(type);
  Py_XSETREF(fallback_error, type);
}

}  // namespace fastpatch
