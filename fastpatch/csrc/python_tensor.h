// Tensors as Python objects. torch's own header for them takes half a minute to compile, so one file includes it.
#pragma once

#include <typeinfo>

#include <torch/csrc/python_headers.h>

#include "reasons.h"

namespace at {
class Tensor;
}

namespace fastpatch {

// The tensor behind a Python object that is exactly torch.Tensor or torch.nn.Parameter, else nullptr.
const at::Tensor* exact_tensor(PyObject* object);

// A tensor that C++ reached on its own way (a gradient) may have a Python face that is a subclass: that, borrowed, else
// nullptr.
PyObject* subclass_face(const at::Tensor& tensor);

// The reason for a Python object that exact_tensor() rejects.
Reason why_not_exact(PyObject* object);

// Any tensor, subclasses included.
bool is_tensor(PyObject* object);

// The tensor behind an object of which is_tensor() is true.
const at::Tensor& any_tensor(PyObject* object);

// A new reference.
PyObject* wrap(const at::Tensor& tensor);

// Shows C++ autograd nodes of this type as the Python type `grad_fn_type`.
void show_node_as(const std::type_info& node, PyTypeObject* grad_fn_type);

// Throws the Python error that is set, for torch to raise where the caller is: autograd's threads have no such place.
[[noreturn]] void throw_python_error();

// For catch (...): sets the Python error that torch would set, returns nullptr.
PyObject* raise_current_exception();

}  // namespace fastpatch
