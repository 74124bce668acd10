// The runner of all C++ tests.
#pragma once

#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <stdexcept>
#include <utility>
#include <vector>

namespace pycomm::test {

// True if `body` throws what invalid input may cause.
template <class Body>
bool refused(Body body) {
  try {
    body();
    return false;
  } catch (const std::invalid_argument&) {
    return true;
  }
}

// Runs named tests, those whose names contain `only`. Returns the process's exit status: 0 if all
// passed.
inline int run_all(const std::vector<std::pair<const char*, std::function<void()>>>& tests,
                   const char* only = "") {
  int failed = 0;
  for (const auto& [name, body] : tests) {
    if (std::strstr(name, only) == nullptr) continue;
    try {
      body();
      std::printf("passed  %s\n", name);
    } catch (const std::exception& error) {
      std::printf("FAILED  %s: %s\n", name, error.what());
      ++failed;
    }
    std::fflush(stdout);
  }
  return failed == 0 ? 0 : 1;
}

// Runs named tests up to the first that fails, which is enough for a mutant.
inline int run_until_failure(
    const std::vector<std::pair<const char*, std::function<void()>>>& tests) {
  for (const auto& test : tests) {
    if (run_all({test}) != 0) return 1;
  }
  return 0;
}

}  // namespace pycomm::test
