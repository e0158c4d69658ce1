// What nearly every file includes, and what takes most of its time: the build reads it once for all of them.
#include <torch/csrc/python_headers.h>

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
