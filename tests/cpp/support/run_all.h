// The runner of all C++ tests.
#pragma once

#include <cstdio>
#include <cstdlib>
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

using NamedTests = std::vector<std::pair<const char*, std::function<void()>>>;

// The tests of a program that run. If PYCOMM_PART of the environment is 0 to 4, a fifth of four or
// more runs, chosen as in tests/support/parts.py.
inline NamedTests of_part(const NamedTests& tests) {
  const char* const wanted = std::getenv("PYCOMM_PART");
  if (wanted == nullptr || *wanted == '\0' || tests.size() < 4) return tests;
  const std::size_t part = std::strtoul(wanted, nullptr, 10);
  if (tests.size() < 5) return {tests[part % tests.size()]};
  NamedTests kept;
  for (std::size_t i = 0; i < tests.size(); ++i) {
    if ((i + i / 5) % 5 == part) kept.push_back(tests[i]);
  }
  return kept;
}

// Runs named tests, those whose names contain `only`. Returns the process's exit status: 0 if all
// passed.
inline int run_all(const NamedTests& tests, const char* only = "") {
  int failed = 0;
  for (const auto& [name, body] : of_part(tests)) {
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
inline int run_until_failure(const NamedTests& tests) {
  for (const auto& test : of_part(tests)) {
    if (run_all({test}) != 0) return 1;
  }
  return 0;
}

}  // namespace pycomm::test
