#include "numbers.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "../guards.h"
#include "../python_tensor.h"

namespace fastpatch {

bool is_number(PyObject* object, double* value) {
  if (PyFloat_CheckExact(object)) {
    *value = PyFloat_AS_DOUBLE(object);
    return true;
  }
  if (PyLong_CheckExact(object)) {
    int overflow = 0;
    const long long integer = PyLong_AsLongLongAndOverflow(object, &overflow);
    *value = static_cast<double>(integer);
    // 2^53: beyond it stock's own conversions round at other places.
    return overflow == 0 && std::llabs(integer) <= (1LL << 53);
  }
  if (PyFloat_Check(object) && std::strcmp(Py_TYPE(object)->tp_name, "numpy.float64") == 0) {
    *value = PyFloat_AS_DOUBLE(object);
    return true;
  }
  return false;
}

namespace {

// What a plain floating-point tensor without dimensions and gradient holds.
bool is_tensor_number(PyObject* object, double* value, const void** memory) {
  const at::Tensor* tensor = exact_tensor(object);
  if (tensor == nullptr || check_floating_anywhere(*tensor) != Reason::served || !tensor->is_cpu() ||
      tensor->dim() != 0 || tensor->requires_grad() || check_storage(*tensor, *tensor) != Reason::served) {
    return false;
  }
  *value = tensor->item<double>();
  *memory = tensor->const_data_ptr();
  return true;
}

}  // namespace

Reason check_number(PyObject* object, double* value, const void** memory) {
  if (!is_number(object, value) && (memory == nullptr || !is_tensor_number(object, value, memory))) {
    return is_tensor(object) ? Reason::tensor_hyperparameter : Reason::hyperparameter;
  }
  const bool fits = std::abs(*value) <= std::numeric_limits<float>::max();  // false for NaN
  return fits ? Reason::served : Reason::hyperparameter;
}

}  // namespace fastpatch
