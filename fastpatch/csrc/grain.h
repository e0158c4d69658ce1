// Up to so many elements ATen's element-wise and reducing loops take one thread, and no thread's share is smaller.
// Where shares begin decides bits.
#pragma once

#include <cstdint>

namespace fastpatch {

constexpr int64_t grain = 32768;  // at::internal::GRAIN_SIZE, whose header is a heavy one

}  // namespace fastpatch
