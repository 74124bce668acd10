#include "checker/fibers.h"

#include <cstdint>

#include "checker/clock.h"

namespace pycomm::checker {
namespace {

constexpr std::size_t kStack = 256 << 10;

}  // namespace

// makecontext() passes on nothing but ints.
void Fibers::enter(unsigned high, unsigned low) {
  const std::uint64_t address = std::uint64_t{high} << 32 | low;
  reinterpret_cast<Fibers*>(static_cast<std::uintptr_t>(address))->live();
}

void Fibers::live() {
  Fiber& fiber = fibers_[current_];
  try {
    body_(static_cast<int>(current_));
  } catch (const Abandoned&) {
  } catch (...) {
    fiber.error = std::current_exception();
  }
  fiber.done = true;
  swapcontext(&fiber.context, &scheduler_);
}

void Fibers::run(int count, std::function<void(int)> body) {
  body_ = std::move(body);
  fibers_ = std::vector<Fiber>(static_cast<std::size_t>(count));
  const std::uint64_t address = reinterpret_cast<std::uintptr_t>(this);
  for (Fiber& fiber : fibers_) {
    fiber.stack = std::make_unique<std::byte[]>(kStack);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    makecontext(&fiber.context, reinterpret_cast<void (*)()>(&Fibers::enter), 2,
                static_cast<unsigned>(address >> 32), static_cast<unsigned>(address));
  }
  while (Fiber* const next = choose()) {
    resume(*next);
    if (!next->error) continue;
    abandon_all();
    std::rethrow_exception(next->error);
  }
  const std::string who_waits = stuck();
  if (who_waits.empty()) return;
  abandon_all();
  throw Violation("all wait for each other:" + who_waits);
}

// One that can go on, or null.
Fibers::Fiber* Fibers::choose() {
  const std::size_t start = seed_ == 0 ? current_ : random_() % fibers_.size();
  for (std::size_t i = 0; i < fibers_.size(); ++i) {
    Fiber& fiber = fibers_[(start + i) % fibers_.size()];
    if (!fiber.done && (!fiber.condition || fiber.condition())) return &fiber;
  }
  return nullptr;
}

void Fibers::resume(Fiber& fiber) {
  current_ = static_cast<std::size_t>(&fiber - fibers_.data());
  fiber.condition = nullptr;
  swapcontext(&scheduler_, &fiber.context);
}

// Lets all end that have not, so that nothing stays on their stacks.
void Fibers::abandon_all() {
  abandoning_ = true;
  for (Fiber& fiber : fibers_) {
    if (!fiber.done) resume(fiber);
  }
}

std::string Fibers::stuck() const {
  std::string text;
  for (const Fiber& fiber : fibers_) {
    if (!fiber.done) text += "\n  " + fiber.what();
  }
  return text;
}

void Fibers::wait_until(std::function<bool()> condition, std::function<std::string()> what) {
  Fiber& fiber = fibers_[current_];
  if (!abandoning_ && condition()) return;
  if (!abandoning_) {
    fiber.condition = std::move(condition);
    fiber.what = std::move(what);
    swapcontext(&fiber.context, &scheduler_);
  }
  if (abandoning_) throw Abandoned();
}

void Fibers::pause() {
  Fiber& fiber = fibers_[current_];
  if (!abandoning_ && seed_ != 0) swapcontext(&fiber.context, &scheduler_);
  if (abandoning_) throw Abandoned();
}

}  // namespace pycomm::checker
