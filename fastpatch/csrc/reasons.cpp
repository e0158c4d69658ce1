#include "reasons.h"

namespace fastpatch {
namespace {

struct Line {
  const char* code;
  const char* text;
  const char* advice;
};

#define FASTPATCH_LINE(code, text, advice) {#code, text, advice},
constexpr Line lines[] = {FASTPATCH_REASONS(FASTPATCH_LINE)};
#undef FASTPATCH_LINE

}  // namespace

const char* reason_code(Reason reason) {
  return lines[static_cast<int>(reason)].code;
}

const char* reason_text(Reason reason) {
  return lines[static_cast<int>(reason)].text;
}

const char* reason_advice(Reason reason) {
  return lines[static_cast<int>(reason)].advice;
}

}  // namespace fastpatch
