// Ranks as fibers of one thread. One of them runs until it has to wait; then another one does. Who is
// next is decided by a seed alone, or by whoever looks for all possibilities, so every run can be
// repeated.
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
  // Which of the fibers that can go on is next. `current` has run last; it may be one of them.
  using Choice =
      std::function<std::size_t(const std::vector<std::size_t>& ready, std::size_t current)>;
  explicit Fibers(Choice choice) : choice_(std::move(choice)) {}
  // Seed 0: in order, and each as far as it gets. Other seeds: at random.
  explicit Fibers(unsigned seed);

  // Runs body(0), ..., body(count - 1) to their ends; rethrows the first exception. It is a Violation
  // if all that are left wait for each other. After an exception the others never end.
  void run(int count, std::function<void(int)> body);

  // Called by a fiber: returns once `condition` holds. `what`: what it waits for, in messages.
  void wait_until(std::function<bool()> condition, std::function<std::string()> what);
  // Called by a fiber where another one may come in between.
  void pause();
  // Which fiber runs.
  std::size_t current() const { return current_; }

 private:
  struct Fiber {
    ucontext_t context;
    std::unique_ptr<std::byte[]> stack;
    std::function<bool()> condition;
    std::function<std::string()> what;
    std::exception_ptr error;
    bool done = false;
    void* caught = nullptr;  // exceptions that it handles, and how many are on their way
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
  Fiber* next_ = nullptr;  // chosen by the one before
  ucontext_t scheduler_;
};

}  // namespace pycomm::checker
