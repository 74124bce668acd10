// Records: readers see whole entries while their rank writes, and what ranks have done.
#include <algorithm>
#include <memory>
#include <thread>
#include <vector>

#include "cpu/onlooker.h"
#include "support/world.h"

namespace pycomm::test {
namespace {

// An operation all of whose fields follow from its number.
Operation numbered(std::uint32_t number) {
  Operation operation;
  operation.collective = Collective::all_reduce;
  operation.count = number;
  operation.offset = number;
  operation.details = number;
  operation.codec.k = number;
  return operation;
}

void readers_see_whole_entries() {
  constexpr int kReads = 20000;
  const auto record = std::make_unique<cpu::Record>();
  std::atomic<bool> over{false};
  std::uint32_t written = 0, last = 0;
  std::jthread writer([&] {
    while (!over) {
      ++written;
      record->enter(numbered(written), written);
      record->end(written % 2 == 0);
      if (written % 1024 == 0) std::this_thread::yield();
    }
  });
  for (int seen = 0; seen < kReads;) {
    const std::optional<cpu::RecordedTicks> entry = record->read();
    if (!entry) continue;
    ++seen;
    const bool whole = entry->operation == numbered(entry->number);
    if (!whole || entry->number < last) over = true;
    PYCOMM_CHECK(whole, "an entry is torn");
    PYCOMM_CHECK(entry->number >= last, "an older entry came back");
    last = entry->number;
  }
  over = true;
  writer.join();
  PYCOMM_CHECK(record->read()->number == written, "the last entry stays");
}

void tells_what_ranks_did() {
  constexpr int kRanks = 3, kOperations = 300;
  World world(kRanks, 64 << 10);
  world.run([&](int r) {
    std::vector<float> x(2048, 1);
    for (int i = 0; i < kOperations; ++i) {
      const std::int64_t count = i % 2 == 0 ? 8 : 2048;
      world[r].run(
          {Collective::all_reduce, Algorithm::one_shot, DType::f32, ReduceOp::sum, 0, count},
          x.data(), x.data());
    }
  });
  for (const RankState& state : world[0].state(cpu::kRecords).ranks) {
    PYCOMM_CHECK(state.recorded.size() == cpu::kRecords, "a ring is full");
    std::uint32_t expected = kOperations - cpu::kRecords;
    double before = 0;
    for (const Recorded& recorded : state.recorded) {
      PYCOMM_CHECK(recorded.number == ++expected, "operations come in order");
      PYCOMM_CHECK(recorded.operation.count == (recorded.number % 2 == 1 ? 8 : 2048),
                   "an operation has another one's number");
      PYCOMM_CHECK(recorded.entered >= before, "time does not run backwards");
      PYCOMM_CHECK(recorded.done >= recorded.entered, "no operation ends before it begins");
      before = recorded.done;
    }
  }
  PYCOMM_CHECK(world[0].state(5).ranks[1].recorded.front().number == kOperations - 4,
               "the last five");
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm::test;
  return run_all({{"readers see whole entries", readers_see_whole_entries},
                  {"tells what ranks did", tells_what_ranks_did}});
}
