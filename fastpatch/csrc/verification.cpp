#include "verification.h"

#include <random>

namespace fastpatch {
namespace {

PyObject* verifier = nullptr;

}  // namespace

bool Verification::draw(const Target& target, Switch state) {
  const double rate = state == Switch::proof ? 0.0 : target.verify_rate();
  if (rate <= 0.0) {
    return false;
  }
  // Of its own: the random numbers of the user's program must stay what they are.
  thread_local std::minstd_rand numbers{std::random_device{}()};
  return std::uniform_real_distribution<double>()(numbers) < rate;
}

bool Verification::begin(const Target& target, const char* kind, PyObject* arguments) {
  const Owned rest(arguments);
  const Owned first(rest ? Py_BuildValue("(ss)", target.name, kind) : nullptr);
  const Owned all(first ? PySequence_Concat(first.get(), rest.get()) : nullptr);
  Owned end(all ? PyObject_CallObject(verifier, all.get()) : nullptr);
  if (!end) {
    return false;
  }
  end_ = end.get() == Py_None ? Owned() : std::move(end);
  return true;
}

bool Verification::end(PyObject* results) {
  const Owned given(results);
  if (!end_) {
    return true;
  }
  const Owned done(given ? PyObject_CallOneArg(end_.get(), given.get()) : nullptr);
  return static_cast<bool>(done);
}

void Verification::set_verifier(PyObject* verify) {
  Py_XSETREF(verifier, Py_NewRef(verify));
}

}  // namespace fastpatch
