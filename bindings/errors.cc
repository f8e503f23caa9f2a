#include "errors.h"

#include <nanobind/stl/string.h>

#include <string>

namespace nb = nanobind;

namespace {

// Borrowed from the module, which lives as long as the interpreter.
PyObject* core_error = nullptr;

}  // namespace

namespace shoal {

void raise(const Status& status) {
  const nb::tuple args = nb::make_tuple(static_cast<int>(status.code()), status.message());
  PyErr_SetObject(core_error, args.ptr());
  throw nb::python_error();
}

void check(const Status& status) {
  if (!status.ok()) raise(status);
}

}  // namespace shoal

void bind_errors(nb::module_& m) {
  // Read from args, so that a pickled or hand-made one has them too.
  const auto argument = [](size_t index) {
    return [index](nb::handle self) { return nb::object(self.attr("args")[index]); };
  };
  nb::dict members;
  members["code"] = nb::module_::import_("builtins").attr("property")(nb::cpp_function(argument(0)));
  members["__str__"] = nb::cpp_function(argument(1), nb::is_method());
  members["__doc__"] = "A failure of the core; args = (code, message), code is one of the core's codes.";
  const std::string name = nb::cast<std::string>(m.attr("__name__")) + ".CoreError";
  nb::object type = nb::steal(PyErr_NewException(name.c_str(), PyExc_Exception, members.ptr()));
  if (!type.is_valid()) throw nb::python_error();
  core_error = type.ptr();
  m.attr("CoreError") = type;
}
