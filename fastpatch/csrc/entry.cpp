#include "entry.h"

#include <algorithm>

#include "owned.h"
#include "user_line.h"

namespace fastpatch {
namespace {

constexpr const char* capsule_name = "fastpatch.entry";

PyObject* scope_variable = nullptr;
PyObject* fallback_error = nullptr;
PyObject* cuda_prover = nullptr;
PyObject* first_fallback = nullptr;
constexpr size_t most_targets = 16;
thread_local int64_t passes_left[most_targets] = {};  // by the target's index

void free_entry(PyObject* capsule) {
  auto* entry = static_cast<Entry*>(PyCapsule_GetPointer(capsule, capsule_name));
  Py_DECREF(entry->stock);
  delete entry;
}

// The value of the context variable is None or (switches: list of int, enclosing one or None, rate of verification).
Switch scope_switch(size_t index, double* verify_rate = nullptr) {
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
    if (verify_rate != nullptr) {
      *verify_rate = PyFloat_AsDouble(PyTuple_GET_ITEM(at, 2));
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

Target::Target(const char* name, CudaProofs& cuda) : name(name), cuda(cuda) {
  all_targets().push_back(this);
}

Target* find_target(PyObject* name) {
  for (Target* target : all_targets()) {
    if (PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, target->name) == 0) {
      return target;
    }
  }
  PyErr_Format(PyExc_ValueError, "unknown target %R", name);
  return nullptr;
}

Switch Target::state(Switch least) const {
  const Switch scoped = scope_switch(index);
  return scoped == Switch::inherit ? std::max(process.load(std::memory_order_relaxed), least) : scoped;
}

double Target::verify_rate() const {
  double scoped = 0;
  return scope_switch(index, &scoped) == Switch::inherit ? process_verify_rate.load(std::memory_order_relaxed) : scoped;
}

PyObject* Target::raise_fallback(Reason reason) const {
  PyObject* error = PyObject_CallFunction(
      fallback_error, "ssss", name, reason_code(reason), reason_text(reason), reason_advice(reason));
  if (error != nullptr) {
    PyErr_SetObject(fallback_error, error);
    Py_DECREF(error);
  }
  return nullptr;
}

void Target::tell_first_fallback(Reason reason) const {
  if (first_fallback == nullptr) {
    return;
  }
  const Owned line(user_line());
  const Owned done(
      line ? PyObject_CallFunction(first_fallback, "ssO", name, reason_code(reason), line.get()) : nullptr);
  if (!done) {
    PyErr_WriteUnraisable(first_fallback);  // it must not cost the call
  }
}

bool Target::prove_on_cuda() const {
  const int device = CudaProofs::take_unknown();
  if (device < 0 || cuda_prover == nullptr || PyErr_Occurred()) {
    return false;
  }
  PyObject* done = PyObject_CallFunction(cuda_prover, "si", name, device);
  if (done == nullptr) {
    return false;
  }
  Py_DECREF(done);
  return cuda.is_known(device);
}

PyObject* make_entry(PyMethodDef* definition, PyObject* stock, Target* target) {
  Py_INCREF(stock);
  PyObject* capsule = PyCapsule_New(new Entry{stock, false, target}, capsule_name, free_entry);
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

PyObject* table_of_guards(const std::vector<GuardLine>& lines) {
  Owned table(PyTuple_New(static_cast<Py_ssize_t>(lines.size())));
  for (size_t i = 0; table && i < lines.size(); ++i) {
    const auto& reasons = lines[i].reasons;
    Owned codes(PyTuple_New(static_cast<Py_ssize_t>(reasons.size())));
    for (size_t k = 0; codes && k < reasons.size(); ++k) {
      PyTuple_SET_ITEM(codes.get(), static_cast<Py_ssize_t>(k), PyUnicode_FromString(reason_code(reasons[k])));
    }
    PyObject* line = codes ? Py_BuildValue("sO", lines[i].question, codes.get()) : nullptr;
    if (line == nullptr) {
      return nullptr;
    }
    PyTuple_SET_ITEM(table.get(), static_cast<Py_ssize_t>(i), line);
  }
  return table ? Py_NewRef(table.get()) : nullptr;
}

ParameterNames::ParameterNames(std::initializer_list<const char*> names, int max_positional)
    : max_positional_(max_positional) {
  for (const char* name : names) {
    names_.push_back(PyUnicode_InternFromString(name));
  }
}

int ParameterNames::find(PyObject* keyword, int hint) const {
  for (int k = 0; k < size(); ++k) {
    const int i = (hint + k) % size();
    if (names_[i] == keyword) {
      return i;
    }
  }
  for (int i = 0; i < size(); ++i) {
    if (PyUnicode_Check(keyword) && PyUnicode_Compare(names_[i], keyword) == 0) {
      return i;
    }
  }
  return -1;
}

bool Arguments::bind(const ParameterNames& names, PyObject** bound) const {
  const Py_ssize_t given = PyTuple_GET_SIZE(positional);
  if (given > names.max_positional()) {
    return false;
  }
  std::fill_n(bound, names.size(), nullptr);
  for (Py_ssize_t i = 0; i < given; ++i) {
    bound[i] = PyTuple_GET_ITEM(positional, i);
  }
  PyObject* keyword = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t position = 0;
  int at = static_cast<int>(given) - 1;
  while (keywords != nullptr && PyDict_Next(keywords, &position, &keyword, &value)) {
    at = names.find(keyword, at + 1);
    if (at < 0 || bound[at] != nullptr) {
      return false;
    }
    bound[at] = value;
  }
  return true;
}

PassInner::PassInner(const Target& target, int64_t passes) : left_(passes_left[target.index]), saved_(left_) {
  left_ = passes;
}

PassInner::~PassInner() {
  left_ = saved_;
}

bool PassInner::has_one(const Target& target) {
  return passes_left[target.index] != 0;
}

bool PassInner::take(const Target& target) {
  int64_t& left = passes_left[target.index];
  if (left == 0) {
    return false;
  }
  --left;
  return true;
}

void set_scope_variable(PyObject* variable) {
  Py_INCREF(variable);
  Py_XSETREF(scope_variable, variable);
}

void set_first_fallback(PyObject* told) {
  Py_XSETREF(first_fallback, Py_NewRef(told));
}

void set_cuda_prover(PyObject* prove) {
  Py_XSETREF(cuda_prover, Py_NewRef(prove));
}

void set_fallback_error(PyObject* type) {
  Py_INCREF(type);
  Py_XSETREF(fallback_error, type);
}

}  // namespace fastpatch
