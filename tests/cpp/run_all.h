// What every C++ test begins with.
#pragma once

#include <cstdio>
#include <exception>
#include <functional>
#include <utility>
#include <vector>

namespace pycomm::test {

// Runs named tests; the process's exit status says whether all passed.
inline int run_all(const std::vector<std::pair<const char*, std::function<void()>>>& tests) {
  int failed = 0;
  for (const auto& [name, body] : tests) {
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

}  // namespace pycomm::test
