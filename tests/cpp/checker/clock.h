// Vector clocks: what each thread knows of the others. A thread's own time advances with every
// release. Another thread knows of an access if it has acquired a later release.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace pycomm::checker {

// Thrown if the checked code breaks a rule. The message says who did what, and when.
struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline constexpr int kMostThreads = 120;
using Time = std::uint32_t;  // of a thread; 0 means never

struct Clock {
  std::array<Time, kMostThreads> times{};

  Time& operator[](int thread) { return times[static_cast<std::size_t>(thread)]; }
  Time operator[](int thread) const { return times[static_cast<std::size_t>(thread)]; }
  void join(const Clock& other) {
    for (std::size_t i = 0; i < times.size(); ++i) times[i] = std::max(times[i], other.times[i]);
  }
};

// A rank, or a carrier that sends and receives for it.
struct Thread {
  int index;
  int process;  // the rank whose memory it may use
  std::string name;
  Clock clock;
  // For messages: what the thread was doing at which time.
  std::vector<std::string> operations;
  std::vector<std::pair<std::size_t, int>> moments;  // by time: (operation, releases in it)
  int releases = 0;

  Thread(int index, int process, std::string name)
      : index(index), process(process), name(std::move(name)) {
    operations.push_back("the beginning");
    moments.resize(1);
    tick();
  }
  Time now() const { return clock[index]; }
  void begin(std::string operation) {
    operations.push_back(std::move(operation));
    releases = -1;
    tick();
  }
  // The clock that a release publishes.
  Clock release() {
    const Clock published = clock;
    tick();
    return published;
  }
  std::string when(Time time) const {
    const auto [operation, signals] = moments[time];
    return name + " in " + operations[operation] + " after " + std::to_string(signals) +
           " releases";
  }

 private:
  void tick() {
    ++clock[index];
    moments.emplace_back(operations.size() - 1, ++releases);
  }
};

}  // namespace pycomm::checker
