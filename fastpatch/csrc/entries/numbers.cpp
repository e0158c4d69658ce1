#include "numbers.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

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

Reason check_number(PyObject* object, double* value) {
  if (!is_number(object, value)) {
    return is_tensor(object) ? Reason::tensor_hyperparameter : Reason::hyperparameter;
  }
  const bool fits = std::abs(*value) <= std::numeric_limits<float>::max();  // false for NaN
  return fits ? Reason::served : Reason::hyperparameter;
}

}  // namespace fastpatch
