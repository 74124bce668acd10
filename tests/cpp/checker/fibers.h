// Ranks as fibers of one thread. One of them runs until it has to wait; then another one does. Which
// one, is decided by a seed alone, so every run can be repeated.
#pragma once

#include <ucontext.h>

#include <exception>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace pycomm::checker {

class Fibers {
 public:
  // Seed 0: in order, and each as far as it gets.
  explicit Fibers(unsigned seed) : seed_(seed), random_(seed) {}

  // Runs body(0), ..., body(count - 1) to their ends; rethrows the first exception. It is a Violation
  // if all that are left wait for each other.
  void run(int count, std::function<void(int)> body);

  // Called by a fiber: returns once `condition` holds. `what`: what it waits for, in messages.
  void wait_until(std::function<bool()> condition, std::function<std::string()> what);
  // Called by a fiber where another one may come in between.
  void pause();

 private:
  struct Fiber {
    ucontext_t context;
    std::unique_ptr<std::byte[]> stack;
    std::function<bool()> condition;
    std::function<std::string()> what;
    std::exception_ptr error;
    bool done = false;
  };
  struct Abandoned {};

  static void enter(unsigned high, unsigned low);
  void live();
  Fiber* choose();
  void resume(Fiber& fiber);
  void abandon_all();
  std::string stuck() const;

  const unsigned seed_;
  std::mt19937 random_;
  std::function<void(int)> body_;
  std::vector<Fiber> fibers_;
  std::size_t current_ = 0;
  ucontext_t scheduler_;
  bool abandoning_ = false;
};

}  // namespace pycomm::checker
