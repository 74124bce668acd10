// Ranks as fibers of a single thread. A fiber runs until it has to wait; then another one runs. A
// seed or a caller-provided choice decides which is next, so every run can be repeated.
#pragma once

#include <ucontext.h>

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace pycomm::checker {

class Fibers {
 public:
  // Chooses the next fiber among those that can run. `current` ran last; it may be one of them.
  using Choice =
      std::function<std::size_t(const std::vector<std::size_t>& ready, std::size_t current)>;
  explicit Fibers(Choice choice) : choice_(std::move(choice)) {}
  // Seed 0: in order, each as far as it gets. Other seeds: at random.
  explicit Fibers(unsigned seed);

  // Runs body(0), ..., body(count - 1) to their ends. Rethrows the first exception; the other
  // bodies then never end. Throws a Violation if all remaining bodies wait for each other.
  void run(int count, std::function<void(int)> body);

  // Called by a fiber: returns once `condition` holds. `what` describes the wait in messages.
  void wait_until(std::function<bool()> condition, std::function<std::string()> what);
  // Called by a fiber at a point where another one may run.
  void pause();
  // The running fiber.
  std::size_t current() const { return current_; }

 private:
  struct Fiber {
    ucontext_t context;
    std::unique_ptr<std::byte[]> stack;
    std::function<bool()> condition;
    std::function<std::string()> what;
    std::exception_ptr error;
    bool done = false;
    void* caught = nullptr;  // exceptions being handled, and number in flight
    unsigned thrown = 0;
  };
  static void enter(unsigned high, unsigned low);
  void live();
  Fiber* choose();
  void resume(Fiber& fiber);
  void leave(Fiber& fiber);
  std::string stuck() const;

  const Choice choice_;
  std::function<void(int)> body_;
  std::vector<Fiber> fibers_;
  std::vector<std::size_t> ready_;
  std::size_t current_ = 0;
  Fiber* next_ = nullptr;  // chosen by pause()
  ucontext_t scheduler_;
};

}  // namespace pycomm::checker
