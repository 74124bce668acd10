// Errors of arguments that come through torch.distributed. Gloo raises RuntimeError for most of them,
// pycomm's functions ValueError or TypeError; these errors are both.
#pragma once

#include <c10/util/StringUtil.h>

#include <stdexcept>
#include <string>

#include "c10d/connection.h"

namespace pycomm::c10d {

// Throws pycomm.ArgumentError, or pycomm.ArgumentTypeError, as a Python exception.
[[noreturn]] void throw_argument_error(const std::string& message);
[[noreturn]] void throw_argument_type_error(const std::string& message);

template <class... Parts>
void check_argument(bool condition, const Parts&... message) {
  if (!condition) throw_argument_error(c10::str(message...));
}

// Calls a function of core/ that checks arguments.
template <class Function>
auto with_argument_errors(const Function& function) {
  try {
    return function();
  } catch (const std::invalid_argument& error) {
    throw_argument_error(error.what());
  }
}

}  // namespace pycomm::c10d
