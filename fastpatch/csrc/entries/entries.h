// The functions that each target adds to fastpatch._native.
#pragma once

#include <torch/csrc/python_headers.h>

namespace fastpatch {

PyMethodDef* loss_methods();
PyMethodDef* sgd_methods();
PyMethodDef* sgd_step_methods();

}  // namespace fastpatch
