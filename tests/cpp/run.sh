#!/bin/sh
# Builds and runs the C++ tests: cpp-test (plain), tsan or asan.
set -eu
jobs=1
case "$1" in
  cpp-test) sanitize="" jobs=2 ;;
  tsan) sanitize=thread ;;
  asan) sanitize=address ;;
  *) echo "usage: $0 cpp-test|tsan|asan" >&2; exit 2 ;;
esac
cmake -S . -B "build/$1" -G Ninja -DPYCOMM_SANITIZE="$sanitize" >/dev/null
cmake --build "build/$1"
export TSAN_OPTIONS=halt_on_error=1 ASAN_OPTIONS=detect_leaks=1
ctest --test-dir "build/$1" --output-on-failure -j "$jobs"
