#!/bin/sh
# Builds and runs the C++ tests: cpp-test (plain), tsan or asan. "mutants" runs the checkers against
# the mutants of the code they check, and the long tests, in the build folder of cpp-test. "racecheck"
# searches the kernels and mutants of them for races, in the build folder of tsan. "emulator" builds
# what tests in Python need to run the kernels on the CPU.
#   run.sh WHAT [PART]    with PART, 0 to 4, only a fifth of the mutants, the long tests, and the tests
#                         of each program, and every other program under a sanitizer
set -eu
folder="build/$1" target=all tests="-LE mutant|race|long" mutants="" sanitize="" python=""
objects="$PWD/build/objects"  # with the extension's code, of csrc/cpu
case "$1" in
  cpp-test) ;;
  mutants) folder=build/cpp-test target=mutants tests="-L mutant|long" ;;
  emulator) folder=build/cpp-test target=emulator tests="" python=-DPYCOMM_PYTHON=python ;;
  tsan) sanitize=thread objects="" ;;
  # A mutant's race is not in every order of events.
  racecheck) folder=build/tsan target=racecheck tests="-L race" sanitize=thread objects=""
    mutants="-L mutant --repeat until-pass:3" ;;
  asan) sanitize=address objects="" ;;
  *) echo "usage: $0 cpp-test|mutants|emulator|tsan|racecheck|asan [PART]" >&2; exit 2 ;;
esac
case "$1" in cpp-test|tsan|asan) export PYCOMM_PART="${2-}" ;; esac
export TSAN_OPTIONS=halt_on_error=1 ASAN_OPTIONS=detect_leaks=1

# Runs a command, whose output appears only if it fails.
quietly() {
  "$@" >"$folder/output" 2>&1 || { cat "$folder/output"; exit 1; }
}
run() {
  quietly ctest --test-dir "$folder" --output-on-failure --no-tests=error -j 2 "$@"
  sed -n 's/^100% tests passed.* out of /C++ tests passed: /p' "$folder/output"
}

mkdir -p "$folder"
# shellcheck disable=SC2086
quietly cmake -S . -B "$folder" -G Ninja -DPYCOMM_BUILD_TESTS=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DPYCOMM_SANITIZE="$sanitize" -DPYCOMM_PART="${2-}" -DPYCOMM_UNITED=ON -DPYCOMM_OBJECTS="$objects" $python
echo "building $target in $folder"
quietly cmake --build "$folder" --target "$target"
# shellcheck disable=SC2086
[ -z "$tests" ] || run $tests
# shellcheck disable=SC2086
[ -z "$mutants" ] || run $mutants
