// Where in the user's code a call comes from.
#pragma once

#include <torch/csrc/python_headers.h>

namespace fastpatch {

// "file:line" of the innermost Python frame of this thread that is neither torch's nor ours; of the innermost of all if
// there is none. A new reference, or nullptr with an error set.
PyObject* user_line();

}  // namespace fastpatch
