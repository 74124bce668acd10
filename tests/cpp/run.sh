#!/bin/sh
# Builds and runs the C++ tests: cpp-test (plain), tsan or asan. "mutants" runs the checkers against
# the mutants of the code they check, in the build folder of cpp-test. "racecheck" searches the kernels
# and mutants of them for races, in the build folder of tsan. "emulator" builds what tests in Python
# need to run the kernels on the CPU.
set -eu
folder="build/$1" target=all tests="-LE mutant|race" mutants="" sanitize="" python=""
case "$1" in
  cpp-test) ;;
  mutants) folder=build/cpp-test target=mutants tests="-L mutant" ;;
  emulator) folder=build/cpp-test target=emulator tests="" python=-DPYCOMM_PYTHON=python ;;
  tsan) sanitize=thread ;;
  # A mutant's race is not in every order of events.
  racecheck) folder=build/tsan target=racecheck tests="-L race" sanitize=thread
    mutants="-L mutant --repeat until-pass:3" ;;
  asan) sanitize=address ;;
  *) echo "usage: $0 cpp-test|mutants|emulator|tsan|racecheck|asan" >&2; exit 2 ;;
esac
# shellcheck disable=SC2086
cmake -S . -B "$folder" -G Ninja -DPYCOMM_SANITIZE="$sanitize" $python >/dev/null
cmake --build "$folder" --target "$target"
[ -n "$tests" ] || exit 0
export TSAN_OPTIONS=halt_on_error=1 ASAN_OPTIONS=detect_leaks=1
run() { ctest --test-dir "$folder" --output-on-failure --no-tests=error -j 2 "$@"; }
# shellcheck disable=SC2086
run $tests
# shellcheck disable=SC2086
[ -z "$mutants" ] || run $mutants
