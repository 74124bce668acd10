// What others read of a rank's records (cpu/observe/record.h) and subjects (cpu/observe/subject.h) while it writes
// them, in all orders with few delays (checker/explorer.h): nobody takes a part of an entry or of a
// text for the whole. This file is compiled for ThreadSanitizer, and atomics.cpp observes its atomic
// accesses. Loads come in the program's order here, so memory orders are not checked.
#include <cstdlib>
#include <functional>
#include <string>

#include "checker/atomics.h"
#include "checker/clock.h"
#include "checker/explorer.h"
#include "cpu/observe/record.h"
#include "cpu/observe/subject.h"
#include "support/numbered.h"
#include "support/run_all.h"

namespace pycomm::test {
namespace {

using checker::Violation;

constexpr std::uint32_t kWritten = 3;

struct Run {
  checker::Fibers fibers;
  cpu::Record record{};
  cpu::Subject subject{};
};
Run* run = nullptr;

void write_record(std::uint32_t number) {
  run->record.end(run->record.enter(numbered(number), number, number) + number);
}

void read_record() {
  const std::optional<cpu::RecordedTicks> entry = run->record.read();
  if (!entry) return;
  const bool done = entry->done != cpu::kNotDone;
  if (entry->operation != numbered(entry->number) || entry->subject != entry->number ||
      (done && entry->done != entry->entered + entry->number)) {
    throw Violation("an entry is torn");
  }
}

std::string text_of(std::uint32_t number) {
  return std::string(cpu::Subject::kBytes - number, static_cast<char>('a' + number));
}

void write_subject(std::uint32_t number) { run->subject.write(number, text_of(number)); }

void read_subject() {
  for (std::uint32_t number = 1; number <= kWritten; ++number) {
    const std::string text = run->subject.read(number);
    if (!text.empty() && text != text_of(number)) throw Violation("a text is torn");
  }
}

struct Part {
  void (*write)(std::uint32_t number);
  void (*read)();
};

void once(checker::Explorer& explorer, const Part& part, bool late_stores) {
  Run mine{checker::Fibers(explorer.choice())};
  run = &mine;
  part.write(1);
  const auto pause = [](const volatile void*) { run->fibers.pause(); };
  const auto go_on = [](const volatile void*) {};
  const checker::AtomicsObserver observer{.observes =
                                              [](const volatile void* address) {
                                                const std::less_equal<const volatile void*> up_to;
                                                return up_to(run, address) &&
                                                       up_to(address, run + 1);
                                              },
                                          .late_stores = late_stores,
                                          .thread = [] { return run->fibers.current(); },
                                          .before_read = pause,
                                          .after_read = go_on,
                                          .before_write = pause,
                                          .after_write = go_on};
  checker::observe_atomics(&observer);
  try {
    run->fibers.run(2, [&](int side) {
      if (side == 1) return part.read();
      for (std::uint32_t number = 2; number <= kWritten; ++number) part.write(number);
      checker::finish_store();
    });
  } catch (const std::exception& error) {
    std::printf("FAILED  %s\n", error.what());
    std::fflush(stdout);
    std::_Exit(1);  // fibers have not ended
  }
  checker::observe_atomics(nullptr);
  run = nullptr;
}

void explore(const Part& part) {
  for (const bool late_stores : {true, false}) {
    checker::Explorer explorer(2);
    while (explorer.next()) once(explorer, part, late_stores);
    std::printf("%zu orders\n", explorer.runs());
  }
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm::test;
  return run_all({{"records", [] { explore({write_record, read_record}); }},
                  {"subjects", [] { explore({write_subject, read_subject}); }}});
}
