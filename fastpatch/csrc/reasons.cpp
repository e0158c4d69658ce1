#include "reasons.h"

namespace fastpatch {

const char* reason_code(Reason reason) {
  static const char* const codes[] = {
#define FASTPATCH_CODE(code, text, advice) #code,
      FASTPATCH_REASONS(FASTPATCH_CODE)
#undef FASTPATCH_CODE
  };
  return codes[static_cast<int>(reason)];
}

const char* reason_text(Reason reason) {
  static const char* const texts[] = {
#define FASTPATCH_TEXT(code, text, advice) text,
      FASTPATCH_REASONS(FASTPATCH_TEXT)
#undef FASTPATCH_TEXT
  };
  return texts[static_cast<int>(reason)];
}

const char* reason_advice(Reason reason) {
  static const char* const advices[] = {
#define FASTPATCH_ADVICE(code, text, advice) advice,
      FASTPATCH_REASONS(FASTPATCH_ADVICE)
#undef FASTPATCH_ADVICE
  };
  return advices[static_cast<int>(reason)];
}

}  // namespace fastpatch
