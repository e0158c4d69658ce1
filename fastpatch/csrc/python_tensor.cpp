#include "python_tensor.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>

namespace fastpatch {
namespace {

// Newer releases have load_pyobj(); older ones keep a tag in the lowest bit.
template <class Slot>
PyObject* python_face(const Slot& slot) {
  if constexpr (requires { slot.load_pyobj(); }) {
    return slot.load_pyobj();
  } else {
    return slot._unchecked_untagged_pyobj();
  }
}

// Has its type a __torch_function__ of its own that would be called now? torch marks types without one by a function
// that says so.
bool overrides_torch_function(PyObject* object) {
  using State = at::impl::TorchFunctionDisabledState;
  if (at::impl::PythonTorchFunctionTLS::get_disabled_state() != State::ENABLED) {
    return false;  // e.g. the default override calls on with overrides off
  }
  PyObject* override_ = PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(object)), "__torch_function__");
  if (override_ == nullptr) {
    PyErr_Clear();
    return false;
  }
  static PyObject* const none = PyObject_GetAttrString(ParameterClass, "__torch_function__");
  const bool overrides = override_ != none;
  Py_DECREF(override_);
  return overrides;
}

}  // namespace

const at::Tensor* exact_tensor(PyObject* object) {
  return THPVariable_CheckExact(object) ? &THPVariable_Unpack(object) : nullptr;
}

PyObject* subclass_face(const at::Tensor& tensor) {
  PyObject* face = python_face(*tensor.unsafeGetTensorImpl()->pyobj_slot());
  return face == nullptr || THPVariable_CheckExact(face) ? nullptr : face;
}

Reason why_not_exact(PyObject* object) {
  return overrides_torch_function(object) ? Reason::torch_function
         : is_tensor(object)              ? Reason::subclass
                                          : Reason::arguments;
}

bool is_tensor(PyObject* object) {
  // By its real type: `__class__` may be code of the user's.
  return PyType_IsSubtype(Py_TYPE(object), reinterpret_cast<PyTypeObject*>(THPVariableClass));
}

const at::Tensor& any_tensor(PyObject* object) {
  return THPVariable_Unpack(object);
}

PyObject* wrap(const at::Tensor& tensor) {
  return THPVariable_Wrap(tensor);
}

void show_node_as(const std::type_info& node, PyTypeObject* grad_fn_type) {
  torch::autograd::registerCppFunction(node, grad_fn_type);
}

void throw_python_error() {
  python_error error;
  error.persist();  // the thread state that holds it may be gone before anybody looks
  throw std::move(error);
}

PyObject* raise_current_exception() {
  torch::translate_exception_to_python(std::current_exception());
  return nullptr;
}

}  // namespace fastpatch
