#include "user_line.h"

#include <cstring>
#include <string>

#include "owned.h"

namespace fastpatch {
namespace {

// The folder of a package that was imported, with a separator at its end; empty if that isn't known.
std::string folder_of(const char* package) {
  const Owned name(PyUnicode_FromString(package));
  const Owned module(name ? PyImport_GetModule(name.get()) : nullptr);
  const Owned file(module ? PyObject_GetAttrString(module.get(), "__file__") : nullptr);
  const char* path = file && PyUnicode_Check(file.get()) ? PyUnicode_AsUTF8(file.get()) : nullptr;
  const char* end = path == nullptr ? nullptr : std::strrchr(path, '/');
  PyErr_Clear();
  return end == nullptr ? std::string() : std::string(path, end + 1);
}

bool is_in(const std::string& folder, const char* file) {
  return !folder.empty() && std::strncmp(file, folder.c_str(), folder.size()) == 0;
}

// Of a frame; empty where its file isn't known.
std::string line_of(PyFrameObject* frame, std::string* file) {
  const Owned code(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
  const Owned name(PyObject_GetAttrString(code.get(), "co_filename"));
  const char* text = name && PyUnicode_Check(name.get()) ? PyUnicode_AsUTF8(name.get()) : nullptr;
  PyErr_Clear();
  *file = text == nullptr ? "" : text;
  return *file + ":" + std::to_string(PyFrame_GetLineNumber(frame));
}

}  // namespace

PyObject* user_line() {
  const std::string torch = folder_of("torch");
  const std::string ours = folder_of("fastpatch");
  std::string innermost;
  Owned frame = Owned::borrow(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  while (frame) {
    std::string file;
    auto* const raw = reinterpret_cast<PyFrameObject*>(frame.get());
    const std::string line = line_of(raw, &file);
    if (!is_in(torch, file.c_str()) && !is_in(ours, file.c_str())) {
      return PyUnicode_FromString(line.c_str());
    }
    innermost = innermost.empty() ? line : innermost;
    frame = Owned(reinterpret_cast<PyObject*>(PyFrame_GetBack(raw)));
  }
  return PyUnicode_FromString(innermost.c_str());
}

}  // namespace fastpatch
