// Records: readers see whole entries while their rank writes, and what ranks have done and about what.
// (checker/test_record.cpp has all orders of reads and writes.)
// Counters: no operation is lost, and buckets are near the times in them.
#include <algorithm>
#include <cmath>
#include <memory>
#include <thread>
#include <vector>

#include "cpu/observe/counters.h"
#include "cpu/observe/subject.h"
#include "cpu/observe/window_reader.h"
#include "support/numbered.h"
#include "support/world.h"

namespace pycomm::test {
namespace {

void readers_see_whole_entries() {
  constexpr int kReads = 20000;
  const auto record = std::make_unique<cpu::Record>();
  std::atomic<bool> over{false};
  std::uint32_t written = 0, last = 0;
  std::jthread writer([&] {
    while (!over) {
      ++written;
      record->enter(numbered(written), written, written);
      record->end(written % 2 == 0 ? cpu::ticks() : cpu::kUntimed);
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

void tells_subjects() {
  const auto subject = std::make_unique<cpu::Subject>();
  PYCOMM_CHECK(subject->read(1).empty(), "nothing has been written");
  subject->write(1, "a longer text");
  subject->write(2, "a text");
  PYCOMM_CHECK(subject->read(2) == "a text", "the last text stays");
  PYCOMM_CHECK(subject->read(1).empty(), "another text has taken its place");
  std::string text(500, 'x');
  subject->write(1, text.append("\n"));
  PYCOMM_CHECK(subject->read(1) == std::string(cpu::Subject::kBytes, 'x'), "a long text is cut");
  subject->write(2, "a\x1b[2Jb");
  PYCOMM_CHECK(subject->read(2) == "a?[2Jb", "a terminal gets no control characters");
}

// Some buckets stay, and others come and go: no text is replaced while a record refers to it.
void subjects_outlive_records() {
  constexpr int kRounds = 12, kStaying = 60, kPassing = 30;
  World world(1, 64 << 10);
  const auto exchange = [&](const std::string& text) {
    world[0].set_subject(text);
    world[0].run({Collective::barrier}, nullptr, nullptr);
    const GroupState state = world[0].state(cpu::kRecords);
    for (const Recorded& recorded : state.ranks[0].recorded) {
      PYCOMM_CHECK(!recorded.subject.empty(), "a record has lost its text");
    }
  };
  for (int round = 0; round < kRounds; ++round) {
    for (int i = 0; i < kStaying; ++i) exchange("bucket " + std::to_string(i));
    for (int i = 0; i < kPassing; ++i) exchange("passing " + std::to_string(round * kPassing + i));
  }
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

// Of 200 launches, the device is in the 150th; it has replayed the 11th, which was captured.
void tells_what_devices_did() {
  World world(2, 64 << 10);
  for (std::uint32_t i = 1; i <= 200; ++i) {
    world[0].set_subject(i == 150 ? "a bucket" : "");
    const std::uint32_t number = world[0].record_launch(all_reduce_of(i), i == 11 || i == 199);
    PYCOMM_CHECK(number == i, "launches are numbered from 1");
  }
  using State = Launched::State;
  world[0].show_progress({begun_word(150), done_word(11)});
  const GroupState all = world[1].state(cpu::kRecords);
  PYCOMM_CHECK(all.ranks[1].launched.empty(), "rank 1 has launched nothing");
  const std::vector<Launched>& launched = all.ranks[0].launched;
  PYCOMM_CHECK(launched.size() == 1 + cpu::kRecords, "a ring, and what has no record any more");
  const Launched& gone = launched[0];
  PYCOMM_CHECK(gone.number == 11 && !gone.operation && gone.captured && gone.state == State::done,
               "a replay is known, though not what of");
  for (std::size_t i = 1; i < launched.size(); ++i) {
    const Launched& each = launched[i];
    const auto number = static_cast<std::uint32_t>(i) + 200 - cpu::kRecords;
    PYCOMM_CHECK(each.number == number && each.operation->count == number, "in order");
    PYCOMM_CHECK(each.captured == (number == 199), "what is captured");
    PYCOMM_CHECK(each.state == (number < 150    ? State::done
                                : number == 150 ? State::running
                                                : State::launched),
                 "the device goes on in order");
    PYCOMM_CHECK(each.subject == (number == 150 ? "a bucket" : ""), "what it is about");
    PYCOMM_CHECK((each.since > each.launched) == (number == 150), "since it was seen there");
  }
  const std::vector<Launched> last = world[1].state(4).ranks[0].launched;
  std::vector<std::uint32_t> numbers;
  for (const Launched& each : last) numbers.push_back(each.number);
  PYCOMM_CHECK((numbers == std::vector<std::uint32_t>{11, 150, 197, 198, 199, 200}),
               "the last ones, and those that the device was in");

  world[0].show_progress({done_word(200), begun_word(199)});
  const Launched replayed = world[1].state(2).ranks[0].launched[0];
  PYCOMM_CHECK(replayed.number == 199 && replayed.state == State::running, "another replay");
  PYCOMM_CHECK(world[1].state(1).ranks[0].launched.back().state == State::done, "all is done");
}

void buckets_are_near_the_times_in_them() {
  int before = 0;
  for (std::int64_t time = 1; time < std::int64_t{1} << 48;
       time += std::max(time / 50, std::int64_t{1})) {
    const int bucket = cpu::bucket_of(time);
    PYCOMM_CHECK(bucket == before || bucket == before + 1, "no bucket is left out");
    PYCOMM_CHECK(std::abs(cpu::middle_of(bucket) / static_cast<double>(time) - 1) <= 0.0625,
                 "a middle is far from a time");
    before = bucket;
  }
  PYCOMM_CHECK(before == cpu::kBuckets - 1, "all buckets are used");
  PYCOMM_CHECK(cpu::bucket_of(-5) == 0, "no time is negative");
  PYCOMM_CHECK(cpu::bucket_of(std::int64_t{1} << 62) == before, "the last bucket has no end");
}

void samples_keep_step_with_no_period() {
  for (const std::uint32_t period : {1u, 2u, 3u, 6u, 16u, 100u, 1024u}) {
    for (std::uint32_t phase = 0; phase < period; phase += period / 5 + 1) {
      int sampled = 0;
      for (std::uint32_t i = 0; i < 16000; ++i) sampled += cpu::is_sampled(i * period + phase);
      PYCOMM_CHECK(sampled > 900 && sampled < 1100, "a period has another share of samples");
    }
  }
}

void counts_while_others_read() {
  constexpr int kOperations = 50000;
  const auto counters = std::make_unique<cpu::Counters>();
  std::atomic<bool> over{false};
  std::jthread reader([&] {
    std::uint64_t last = 0;
    while (!over) {
      for (const cpu::CountedOperations& counted : counters->read()) {
        if (counted.size != 64) continue;
        PYCOMM_CHECK(counted.count >= last, "a count grows");
        last = counted.count;
      }
    }
  });
  for (int i = 1; i <= kOperations; ++i) {
    Operation operation;
    operation.collective = Collective::all_reduce;
    const bool timed = i % 16 == 0;
    counters->add(operation, i % 2 == 0 ? 100 : 0, timed ? 16 : 0, {1000, 1500, 3000});
    counters->add(operation, 1000, 1, {1000, i % 2 == 0 ? 1000 : 1100, 3000});
  }
  over = true;
  reader.join();
  const auto all = counters->read();
  PYCOMM_CHECK(all.size() == 3 && all[0].size == 0 && all[1].size == 64 && all[2].size == 512,
               "a row for each size");
  const cpu::CountedOperations& counted = all[1];
  PYCOMM_CHECK(counted.count == kOperations / 2 && counted.bytes == counted.count * 100,
               "an operation is lost");
  PYCOMM_CHECK(all[0].count == kOperations / 2 && all[0].whole.buckets.empty(), "nothing is timed");
  const auto all_took = [](const cpu::Times& times, std::int64_t ticks) {
    return times.buckets.size() == 1 && times.buckets[0].first == cpu::bucket_of(ticks) &&
           times.buckets[0].second == kOperations && times.ticks == ticks * kOperations;
  };
  PYCOMM_CHECK(all_took(counted.whole, 2000) && all_took(counted.exchange, 1500),
               "a time is wrong");
  // Half of these have not waited.
  PYCOMM_CHECK(all_took(all[2].whole, 2000) && all[2].exchange.ticks == 1950 * kOperations,
               "a time is wrong");
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm::test;
  return run_all({{"readers see whole entries", readers_see_whole_entries},
                  {"tells subjects", tells_subjects},
                  {"subjects outlive records", subjects_outlive_records},
                  {"tells what ranks did", tells_what_ranks_did},
                  {"tells what devices did", tells_what_devices_did},
                  {"buckets are near the times in them", buckets_are_near_the_times_in_them},
                  {"samples keep step with no period", samples_keep_step_with_no_period},
                  {"counts while others read", counts_while_others_read}});
}
