// The ring of messages and the queue of its answers (cpu/p2p/ring.h) in all orders with few delays
// (checker/explorer.h): no side reads what is not written yet or overwrites what is not read yet,
// and none sleeps for ever. This file is compiled for ThreadSanitizer, and atomics.cpp observes its
// atomic accesses. Copies are checked by vector clocks (checker/memory.h), which only the memory
// orders of the counters advance.
#include <cstdlib>
#include <deque>
#include <map>
#include <vector>

#include "checker/atomics.h"
#include "checker/explorer.h"
#include "checker/memory.h"
#include "cpu/p2p/ring.h"
#include "support/run_all.h"

namespace pycomm::test {
namespace {

using namespace cpu::p2p;
using checker::Violation;

constexpr std::int64_t kSlack = 4 << 10;  // for copies of mutants that go too far
constexpr std::int64_t kMessages[] = {1000, 0, 2000, 65, 1500};  // bytes
constexpr std::size_t kCount = std::size(kMessages);
// The ring is almost full of earlier frames, of which the first ones are small.
constexpr std::int64_t kEarlier[] = {0,          1900,       kDataBytes, kDataBytes, kDataBytes,
                                     kDataBytes, kDataBytes, kDataBytes, kDataBytes, 62000};
constexpr std::uint64_t kUnread = kAnswers + 1 - kCount;  // earlier answers: no room for the last
// The ring and the counters wrap around during the run.
constexpr std::uint64_t kFirstByte = std::uint64_t{0} - 1536;
constexpr std::uint64_t kFirstAnswer = std::uint64_t{0} - kUnread - 2;

// As in Node::wake() and Engine::doze().
struct Sleeper {
  std::atomic<std::uint32_t> asleep{0}, rung{0};
};

struct Run {
  checker::Fibers fibers;
  checker::Memory memory;
  checker::Thread sender{0, 0, "the sender"}, receiver{1, 1, "the receiver"};
  alignas(64) std::byte bytes[kAllocationBytes + kSlack];
  std::byte* shadow;
  Mailbox mailbox{};
  Sleeper sleepers[2];
  bool explores = true;  // false: other orders of what follows are not tried
  std::map<const volatile void*, checker::Clock> released;
  std::deque<checker::Clock> stores[2];  // not visible yet

  explicit Run(checker::Fibers::Choice choice) : fibers(std::move(choice)) {
    memory.introduce(sender);
    memory.introduce(receiver);
    shadow = memory.add("the ring", 0, kAllocationBytes, true);
  }
  checker::Thread& thread() { return fibers.current() == 0 ? sender : receiver; }
  // Where a copy's bytes are in the shadow of the ring; null if they are elsewhere.
  std::byte* in_shadow(const void* at) {
    const auto* const byte = static_cast<const std::byte*>(at);
    return byte >= bytes && byte < bytes + sizeof(bytes) ? shadow + (byte - bytes) : nullptr;
  }
};
Run* run = nullptr;

bool releases(int order) {
  return order == __ATOMIC_RELEASE || order == __ATOMIC_ACQ_REL || order == __ATOMIC_SEQ_CST;
}
bool acquires(int order) {
  return order == __ATOMIC_CONSUME || order == __ATOMIC_ACQUIRE || order == __ATOMIC_SEQ_CST;
}

// The value of a counter, unobserved.
template <class T>
T plain(const std::atomic<T>& counter) {
  T value;
  std::memmove(&value, &counter, sizeof(value));
  return value;
}

void wake(int side) {
  if (run->sleepers[side].asleep.load() != 0) run->sleepers[side].rung.fetch_add(1);
}

// Sleeps until the other side rings, unless there is something to do.
template <class Proceed>
void proceed_or_doze(int side, Proceed proceed) {
  Sleeper& mine = run->sleepers[side];
  while (!proceed()) {
    const std::uint32_t rung = mine.rung.load();
    mine.asleep.fetch_add(1);
    const bool proceeds = proceed();
    if (!proceeds) {
      checker::finish_store();
      run->fibers.wait_until(
          [&, rung] { return plain(mine.rung) != rung; },
          [side] { return side == 0 ? "the sender sleeps" : "the receiver sleeps"; });
    }
    mine.asleep.fetch_sub(1);
    if (proceeds) return;
  }
}

std::byte content(std::size_t message) { return static_cast<std::byte>(17 + message); }

Frame frame_of(std::uint64_t message, std::int64_t bytes) {
  const FrameKind kind = bytes > kEagerBytes ? FrameKind::data : FrameKind::eager;
  return {7, kind, Element::u8, 0, message, bytes, kNotInWindow};
}

// The sender does not ring when it has taken answers.
void nap() {
  const std::uint64_t before = plain(run->mailbox.sender.answers_taken);
  checker::finish_store();
  run->fibers.wait_until([=] { return plain(run->mailbox.sender.answers_taken) != before; },
                         [] { return "the receiver has no room for answers"; });
}

void send() {
  SenderEnd end(run->mailbox, run->bytes);
  std::uint64_t answers = 0;
  const auto take_answers = [&] {
    bool moved = false;
    for (Answer answer{}; end.next(answer); moved = true) {
      if (answer.message != answers++) throw Violation("an answer is lost");
      run->explores = answers < 2 || answers >= kUnread;
    }
    return moved;
  };
  for (std::size_t i = 0; i < kCount; ++i) {
    const std::vector<std::byte> payload(static_cast<std::size_t>(kMessages[i]), content(i));
    const Frame frame = frame_of(i, kMessages[i]);
    proceed_or_doze(0, [&] { return end.room() >= length_of(frame); });
    end.write(frame, payload.data());
    if (end.publish()) wake(1);
  }
  while (answers < kUnread + kCount) proceed_or_doze(0, take_answers);
}

void receive() {
  ReceiverEnd end(run->mailbox, run->bytes, 7, {0, 1});
  Frame frame;
  for (std::size_t i = 0; i < std::size(kEarlier); ++i) {
    run->explores = i < 2 || i + 1 == std::size(kEarlier);
    if (!end.next(frame)) throw Violation("an earlier frame is lost");
    end.release(frame);
    wake(0);
  }
  for (std::size_t i = 0; i < kCount; ++i) {
    proceed_or_doze(1, [&] { return end.next(frame); });
    if (frame.message != i || frame.bytes != kMessages[i]) throw Violation("a frame is lost");
    std::vector<std::byte> payload(static_cast<std::size_t>(frame.bytes));
    end.read_payload(frame, payload.data());
    if (payload != std::vector<std::byte>(payload.size(), content(i))) {
      throw Violation("a message has changed on its way");
    }
    end.release(frame);
    wake(0);
    while (!end.answer({kUnread + i, 0, 7, AnswerKind::taken})) nap();
    wake(0);
  }
}

// Stands for what one side wrote earlier.
void write_earlier(const checker::Thread& thread, std::int64_t place, const void* from,
                   std::size_t bytes) {
  std::memmove(run->bytes + place, from, bytes);
  run->memory.claim(thread, run->shadow + place, static_cast<std::int64_t>(bytes));
}

void prepare(Mailbox& mailbox) {
  std::uint64_t taken = kFirstByte;
  for (const std::int64_t bytes : kEarlier) {
    taken -= static_cast<std::uint64_t>(length_of(frame_of(0, bytes)));
  }
  mailbox.receiver.taken = taken;
  mailbox.sender.sent = kFirstByte;
  for (const std::int64_t bytes : kEarlier) {
    const Frame frame = frame_of(0, bytes);
    write_earlier(run->sender, static_cast<std::int64_t>(taken % kRingBytes), &frame,
                  sizeof(frame));
    taken += static_cast<std::uint64_t>(length_of(frame));
  }
  run->released[&mailbox.sender.sent] = run->sender.release();
  mailbox.sender.answers_taken = mailbox.receiver.answered = kFirstAnswer;
  for (std::uint64_t i = 0; i < kUnread; ++i) {
    const Answer answer{i, 0, 7, AnswerKind::taken};
    const auto place = static_cast<std::int64_t>((kFirstAnswer + i) % kAnswers * sizeof(answer));
    write_earlier(run->receiver, kRingBytes + place, &answer, sizeof(answer));
  }
  mailbox.receiver.answered += kUnread;
  run->released[&mailbox.receiver.answered] = run->receiver.release();
}

[[noreturn]] void fail(const std::exception& error) {
  std::printf("FAILED  %s\n", error.what());
  std::fflush(stdout);
  std::_Exit(1);
}

void check_copy(const void* to, const void* from, std::int64_t bytes) noexcept {
  try {
    if (std::byte* const at = run->in_shadow(to)) run->memory.claim(run->thread(), at, bytes);
    if (std::byte* const at = run->in_shadow(from)) {
      run->memory.read_bytes(run->thread(), at, bytes);
    }
  } catch (const std::exception& error) {
    fail(error);
  }
}

void once(checker::Explorer& explorer, bool late_stores) {
  const auto mine = std::make_unique<Run>(explorer.choice());
  run = mine.get();
  prepare(run->mailbox);
  const auto within = [](const volatile void* address, const auto& object) {
    const auto* const at = static_cast<const volatile std::byte*>(address);
    const auto* const begin = reinterpret_cast<const volatile std::byte*>(&object);
    return at >= begin && at < begin + sizeof(object);
  };
  const auto pause = [](const volatile void*) {
    if (run->explores) run->fibers.pause();
  };
  const checker::AtomicsObserver observer{
      .observes =
          [&](const volatile void* address) {
            return within(address, run->mailbox) || within(address, run->sleepers);
          },
      .late_stores = late_stores,
      .thread = [] { return run->fibers.current(); },
      .before_read = pause,
      .after_read = [](const volatile void*) {},
      .before_write = pause,
      .after_write =
          [&](const volatile void* address) {
            auto& clocks = run->stores[run->fibers.current()];
            run->released[address] = clocks.front();
            clocks.pop_front();
          },
      .loaded =
          [&](const volatile void* address, int order) {
            // Bells order nothing here, so that the counters have to.
            if (acquires(order) && within(address, run->mailbox)) {
              run->thread().clock.join(run->released[address]);
            }
          },
      .stores =
          [](const volatile void*, int order) {
            run->stores[run->fibers.current()].push_back(releases(order) ? run->thread().release()
                                                                         : checker::Clock{});
          }};
  checker::observe_atomics(&observer);
  try {
    run->fibers.run(2, [](int side) { side == 0 ? send() : receive(); });
  } catch (const std::exception& error) {
    fail(error);
  }
  checker::observe_atomics(nullptr);
  run = nullptr;
}

void explore(std::size_t delays) {
  for (const bool late_stores : {true, false}) {
    checker::Explorer explorer(delays);
    while (explorer.next()) once(explorer, late_stores);
    std::printf("%zu orders\n", explorer.runs());
  }
}

}  // namespace
}  // namespace pycomm::test

// Replaces the C library's function, so that copies into and out of the ring are checked.
extern "C" void* memcpy(void* to, const void* from, std::size_t bytes) noexcept {
  using pycomm::test::run;
  if (run != nullptr) pycomm::test::check_copy(to, from, static_cast<std::int64_t>(bytes));
  return std::memmove(to, from, bytes);
}

int main() {
  using namespace pycomm::test;
  return run_all({{"messages and answers", [] { explore(2); }}});
}
