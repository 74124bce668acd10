#include "checker/fibers.h"

#include <cxxabi.h>

#include <cstdint>
#include <utility>

#include "checker/clock.h"
#include "support/dice.h"

namespace pycomm::checker {
namespace {

constexpr std::size_t kStack = 112 << 10;

// The C++ runtime's state per thread, which each fiber needs for itself.
struct Exceptions {
  void* caught;
  unsigned thrown;
};
Exceptions& exceptions() { return *reinterpret_cast<Exceptions*>(abi::__cxa_get_globals()); }

Fibers::Choice choice_of(unsigned seed) {
  if (seed != 0) {
    return [random = test::Dice(seed)](const auto& ready, std::size_t) mutable {
      return ready[random() % ready.size()];
    };
  }
  return [](const auto& ready, std::size_t current) {
    for (const std::size_t i : ready) {
      if (i >= current) return i;
    }
    return ready[0];
  };
}

}  // namespace

Fibers::Fibers(unsigned seed) : Fibers(choice_of(seed)) {}

// makecontext() passes only ints.
void Fibers::enter(unsigned high, unsigned low) {
  const std::uint64_t address = std::uint64_t{high} << 32 | low;
  reinterpret_cast<Fibers*>(static_cast<std::uintptr_t>(address))->live();
}

void Fibers::live() {
  Fiber& fiber = fibers_[current_];
  try {
    body_(static_cast<int>(current_));
  } catch (...) {
    fiber.error = std::current_exception();
  }
  fiber.done = true;
  leave(fiber);
}

void Fibers::leave(Fiber& fiber) { swapcontext(&fiber.context, &scheduler_); }

void Fibers::run(int count, std::function<void(int)> body) {
  body_ = std::move(body);
  fibers_ = std::vector<Fiber>(static_cast<std::size_t>(count));
  const std::uint64_t address = reinterpret_cast<std::uintptr_t>(this);
  for (Fiber& fiber : fibers_) {
    fiber.stack = std::make_unique_for_overwrite<std::byte[]>(kStack);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    makecontext(&fiber.context, reinterpret_cast<void (*)()>(&Fibers::enter), 2,
                static_cast<unsigned>(address >> 32), static_cast<unsigned>(address));
  }
  while (Fiber* const next = next_ != nullptr ? std::exchange(next_, nullptr) : choose()) {
    resume(*next);
    if (next->error) std::rethrow_exception(next->error);
  }
  const std::string who_waits = stuck();
  if (!who_waits.empty()) throw Violation("all wait for each other:" + who_waits);
}

// A fiber that can run, or null.
Fibers::Fiber* Fibers::choose() {
  ready_.clear();
  for (std::size_t i = 0; i < fibers_.size(); ++i) {
    const Fiber& fiber = fibers_[i];
    if (!fiber.done && (!fiber.condition || fiber.condition())) ready_.push_back(i);
  }
  return ready_.empty() ? nullptr : &fibers_[choice_(ready_, current_)];
}

void Fibers::resume(Fiber& fiber) {
  current_ = static_cast<std::size_t>(&fiber - fibers_.data());
  fiber.condition = nullptr;
  const Exceptions mine = std::exchange(exceptions(), {fiber.caught, fiber.thrown});
  swapcontext(&scheduler_, &fiber.context);
  fiber.caught = exceptions().caught;
  fiber.thrown = exceptions().thrown;
  exceptions() = mine;
}

std::string Fibers::stuck() const {
  std::string text;
  for (const Fiber& fiber : fibers_) {
    if (!fiber.done) text += "\n  " + fiber.what();
  }
  return text;
}

void Fibers::wait_until(std::function<bool()> condition, std::function<std::string()> what) {
  if (condition()) return;
  Fiber& fiber = fibers_[current_];
  fiber.condition = std::move(condition);
  fiber.what = std::move(what);
  leave(fiber);
}

void Fibers::pause() {
  Fiber& fiber = fibers_[current_];
  Fiber* const next = choose();
  if (next == &fiber) return;
  next_ = next;
  leave(fiber);
}

}  // namespace pycomm::checker
