// What the two patch points of SGD share.
#pragma once

#include "../entry.h"

namespace fastpatch {

extern Target sgd_target;

}  // namespace fastpatch
