// Python numbers as hyperparameters.
#pragma once

#include <torch/csrc/python_headers.h>

#include "../reasons.h"

namespace fastpatch {

// A float, int or numpy.float64 that becomes a finite float32. NaN, infinities, bools and other types are refused.
// With memory also what one number in a plain floating-point tensor without dimensions and gradient says, which
// PyTorch asks for with item(); *memory is where it lies.
Reason check_number(PyObject* object, double* value, const void** memory = nullptr);

// A float, int or numpy.float64 of any value, NaN and infinities included.
bool is_number(PyObject* object, double* value);

}  // namespace fastpatch
