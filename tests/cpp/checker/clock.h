// Vector clocks: what each thread knows of the others. A thread's own time moves on with every release,
// and an access is known to whoever has acquired a release that came after it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace pycomm::checker {

// The checked code breaks a rule. The message says who did what, and when.
struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline constexpr int kMostThreads = 48;
using Time = std::uint32_t;  // of a thread; 0 is never

struct Clock {
  std::array<Time, kMostThreads> times{};

  Time& operator[](int thread) { return times[static_cast<std::size_t>(thread)]; }
  Time operator[](int thread) const { return times[static_cast<std::size_t>(thread)]; }
  void join(const Clock& other) {
    for (std::size_t i = 0; i < times.size(); ++i) times[i] = std::max(times[i], other.times[i]);
  }
};

// A rank, or what sends and receives for it.
struct Thread {
  int index;
  int process;  // the rank whose memory it may use
  std::string name;
  Clock clock;
  // For messages: what it was doing at which time.
  std::vector<std::string> operations;
  std::vector<std::pair<std::size_t, int>> moments;  // (operation, releases in it) by time
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
  // What a release publishes.
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
