// Starts threads, and explains why none can be started.
#pragma once

#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace pycomm::cpu {

// Names the limits that may have kept a thread from being started, and the values that are known.
std::string thread_limits();

// Starts a thread. Throws std::system_error.
template <class Body>
std::thread start_thread(Body body) {
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& error) {
    throw std::system_error(error.code(), "no thread can be started: " + thread_limits());
  }
}

}  // namespace pycomm::cpu
