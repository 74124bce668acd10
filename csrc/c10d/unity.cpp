// The whole backend as one translation unit, which setup.py and pycomm/_runtime/c10d_build.py
// compile: torch's headers take most of the time, and this way they are read only once.
#include "c10d/backend.cpp"
#include "c10d/completer.cpp"
#include "c10d/connection.cpp"
#include "c10d/future.cpp"
#include "c10d/module.cpp"
#include "c10d/request.cpp"
#include "c10d/tensor_reader.cpp"
#include "c10d/work.cpp"
