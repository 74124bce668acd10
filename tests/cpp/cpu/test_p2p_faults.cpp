// Sends and receives that fail, and bytes of other ranks that are no messages.
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <barrier>
#include <cerrno>
#include <cstring>
#include <memory>
#include <system_error>
#include <thread>

#include "cpu/p2p/ring.h"
#include "support/dice.h"
#include "support/messages.h"
#include "support/world.h"

namespace {

std::atomic<bool> no_threads = false;

}  // namespace

// Stands before the C library's, so that a test can run out of threads.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*function)(void*), void* argument) noexcept {
  if (no_threads) return EAGAIN;
  static const auto next =
      reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  return next(thread, attributes, function, argument);
}

namespace pycomm::test {
namespace {

using cpu::p2p::Answer;
using cpu::p2p::AnswerKind;
using cpu::p2p::Frame;
using cpu::p2p::FrameKind;
using cpu::p2p::Mailbox;
using cpu::p2p::ReceiverEnd;
using cpu::p2p::SenderEnd;

void mismatch_names_both_sides() {
  for (const std::int64_t unit : {1, 10000}) {
    World world(3);
    world.run([&](int r) {
      Bytes data(static_cast<std::size_t>(32 * unit));
      const CollectiveError error = error_of([&] {
        if (r == 0) {
          world[0].send(data.data(), {1, 3, Element::f32, 16 * unit});
          world[0].recv(data.data(), {1, 3, Element::f32, 16 * unit});
        } else if (r == 1) {
          world[1].recv(data.data(), {0, 3, Element::f32, 32 * unit});
        } else {
          world[2].run({Collective::barrier}, nullptr, nullptr);
        }
      });
      const std::string expected = "rank 0 sent " + std::to_string(4 * unit) +
                                   " float32, rank 1 receives " + std::to_string(8 * unit) +
                                   " float32, tag 3";
      must(error.reason == Reason::mismatch && error.rank == 0, "Mismatch blames the sender");
      must(std::string(error.what()).find(expected) == 0, error.what());
    });
  }
}

void times_out() {
  World world(2, 64 << 10, 0, 0.3);
  std::barrier done(2);
  world.run([&](int r) {
    Bytes data(100000);
    if (r == 0) {
      const CollectiveError error =
          error_of([&] { world[0].recv(data.data(), envelope(1, 0, 8)); });
      must(error.reason == Reason::timeout && error.rank == 1, error.what());
      must(error.operation == "recv", "a receive");
    }
    done.arrive_and_wait();
  });
}

// A receive on a rank for which no message comes.
CollectiveError timeout_of(int rank, int source) {
  World world(2);
  Bytes data(8);
  Options options;
  options.timeout = std::chrono::milliseconds(200);
  CollectiveError error =
      error_of([&] { world[rank].recv(data.data(), envelope(source, 0, 8), options); });
  must(error.reason == Reason::timeout, error.what());
  return error;
}

void any_source_times_out() {
  const CollectiveError error = timeout_of(0, kAnySource);
  must(std::string(error.what()).find("a message from any rank") != std::string::npos,
       error.what());
}

void a_receive_from_itself_times_out() {
  const CollectiveError error = timeout_of(1, 1);
  must(error.rank == 1, error.what());
  must(std::string(error.what()).find("for a message from itself") != std::string::npos,
       error.what());
}

void a_send_times_out() {
  World world(2, 64 << 10, 0, 0.3);
  Bytes data(100000);
  const CollectiveError error = error_of([&] { send(world[0], data, 1); });
  must(error.reason == Reason::timeout && error.rank == 1 && error.operation == "send",
       error.what());
}

void notices_who_leaves() {
  World world(2);
  world.run([&](int r) {
    if (r == 1) {
      send(world[1], content(1, 1, 100), 0);
      world[1].close();
      return;
    }
    while (!world[0].gone(1)) std::this_thread::yield();
    must(recv(world[0], 100, 1) == content(1, 1, 100), "what was sent before leaving is received");
    const CollectiveError error = error_of([&] { recv(world[0], 100, 1); });
    must(error.reason == Reason::peer_died && error.rank == 1, error.what());
  });
}

// The group fails once somebody waits for it.
void a_receive_that_nobody_waits_for_ends_alone() {
  World world(3);
  world.run([&](int r) {
    if (r == 1) return world[1].close();
    if (r == 2) {
      must(recv(world[2], 100, 0) == content(0, 1, 100), "the group goes on");
      send(world[2], content(2, 1, 100), 0);
      const CollectiveError error = error_of([&] { recv(world[2], 100, 0); });
      must(error.reason == Reason::peer_died && error.rank == 1, error.what());
      return;
    }
    Bytes data(8);
    const RequestPtr request = irecv(world[0], data, 1);
    while (!request->completed()) std::this_thread::yield();
    send(world[0], content(0, 1, 100), 2);
    must(recv(world[0], 100, 2) == content(2, 1, 100), "the group goes on");
    const CollectiveError error = error_of([&] { request->wait(); });
    must(error.reason == Reason::peer_died && error.rank == 1, error.what());
  });
}

void abort_ends_all() {
  World world(2);
  world.run([&](int r) {
    Bytes data(8);
    if (r == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      world[1].abort();
      return;
    }
    const CollectiveError error = error_of([&] { recv(world[0], 8, 1); });
    must(error.reason == Reason::aborted && error.rank == 1, error.what());
    try {
      recv(world[0], 8, 1);
    } catch (const cpu::GroupUnusable&) {
      return;
    }
    must(false, "a failed group must refuse work");
  });
}

// An operation that nobody would complete does not start, so its buffer may go at once.
void refuses_operations_without_a_thread() {
  World world(2);
  for (const bool receives : {false, true}) {
    Bytes data = content(0, 1, 100000);
    no_threads = true;
    try {
      receives ? irecv(world[0], data, 1) : isend(world[0], data, 1);
      must(false, "an operation must not start without a thread");
    } catch (const std::system_error& error) {
      must(error.code().value() == EAGAIN, error.what());
    }
    no_threads = false;
  }
  must(world[0].idle(), "no operation is pending");
  world.run([&](int r) {
    Bytes data(100000);
    const RequestPtr receive = irecv(world[r], data, 1 - r);
    const Bytes sent = content(r, 2, 100000);
    isend(world[r], sent, 1 - r)->wait();
    receive->wait();
    must(data == content(1 - r, 2, 100000), "the next messages arrive");
  });
}

void fails_if_a_small_send_needs_a_thread() {
  World world(2);
  const Bytes data(cpu::p2p::kEagerBytes);
  std::vector<RequestPtr> requests;
  no_threads = true;
  do requests.push_back(isend(world[0], data, 1));
  while (requests.back()->completed() && requests.size() < 1000 && world[0].usable());
  no_threads = false;
  must(requests.size() > 20, "the ring takes many small messages");
  const CollectiveError error = error_of([&] { requests.back()->wait(); });
  must(error.reason == Reason::aborted && error.rank == 0, error.what());
}

// Rank 0 of a group of two. The test writes rank 1's part of the window.
struct Attacked {
  static constexpr std::int64_t kSlice = 16 << 20, kStaging = 64 << 10;
  std::shared_ptr<cpu::Window> window =
      std::make_shared<cpu::Window>(cpu::Window::create(2, kSlice, kStaging), 2, kSlice, kStaging);
  std::byte* ring = window->heap(1)->allocate(cpu::p2p::kAllocationBytes);
  Mailbox& to_victim = window->mailbox(0, 1);
  cpu::Group victim{window,
                    std::make_shared<const cpu::Liveness>(
                        std::vector<int>(2), std::vector<std::shared_ptr<cpu::Process>>(2)),
                    0,
                    2,
                    2,
                    std::chrono::milliseconds(20),
                    0};

  void open() { to_victim.sender.ring = window->place_in_heap(1, ring, 1); }
  Frame frame(FrameKind kind, std::int64_t bytes) const {
    return {window->id(), kind, Element::u8, 0, 0, bytes, kNotInWindow};
  }
  CollectiveError error_of_recv(std::int64_t bytes = 100) {
    Bytes data(static_cast<std::size_t>(bytes));
    return error_of([&] { victim.recv(data.data(), envelope(1, 0, bytes)); });
  }
};

void blames_the_sender_of_malformed_frames() {
  const std::vector<std::pair<const char*, std::function<void(Frame&)>>> changes = {
      {"from another group", [](Frame& f) { ++f.context; }},
      {"unknown kind", [](Frame& f) { f.kind = static_cast<FrameKind>(77); }},
      {"unknown kind", [](Frame& f) { f.element = static_cast<Element>(200); }},
      {"unknown kind", [](Frame& f) { f.element = Element::same; }},
      {"impossible size", [](Frame& f) { f.bytes = -1; }},
      {"impossible size", [](Frame& f) { f.bytes = std::int64_t{1} << 62; }},
      {"too long", [](Frame& f) { f.bytes = cpu::p2p::kEagerBytes + 1; }},
      {"longer than the bytes that were sent", [](Frame& f) { f.bytes = 5000; }},
      {"out of order", [](Frame& f) { f.message = 3; }},
      {"unknown message", [](Frame& f) { f.kind = FrameKind::data; }},
      {"unknown message", [](Frame& f) { f.kind = FrameKind::written; }},
      {"unknown message", [](Frame& f) { f.kind = FrameKind::piece; }},
      {"outside the heap",
       [](Frame& f) {
         f.kind = FrameKind::announce;
         f.offset = 64;
       }},
      {"outside the heap",
       [](Frame& f) {
         f.kind = FrameKind::announce;
         f.offset = Attacked::kSlice - 50;
       }},
  };
  for (const auto& [what, change] : changes) {
    Attacked attacked;
    attacked.open();
    Frame frame = attacked.frame(FrameKind::eager, 100);
    change(frame);
    std::memcpy(attacked.ring, &frame, sizeof(frame));
    attacked.to_victim.sender.sent = 192;
    const CollectiveError error = attacked.error_of_recv();
    must(error.reason == Reason::malformed && error.rank == 1, error.what());
    must(std::string(error.what()).find(what) != std::string::npos, error.what());
  }
}

// The malformed frame comes after a message that waited for its receive.
void blames_the_sender_when_a_receive_is_posted() {
  Attacked attacked;
  attacked.open();
  Frame frames[] = {attacked.frame(FrameKind::eager, 0),
                    attacked.frame(FrameKind::announce, 100'000),
                    attacked.frame(static_cast<FrameKind>(77), 0)};
  frames[0].tag = 5;
  frames[1].message = 1;
  std::memcpy(attacked.ring, frames, sizeof(frames));
  attacked.to_victim.sender.sent = 2 * sizeof(Frame);
  attacked.victim.recv(nullptr, envelope(1, 5, 0));
  attacked.to_victim.sender.sent = sizeof(frames);
  const CollectiveError error = attacked.error_of_recv(100'000);
  must(error.reason == Reason::malformed && error.rank == 1, error.what());
}

void blames_the_writer_of_impossible_counters() {
  const std::vector<std::function<void(Attacked&)>> changes = {
      [](Attacked& a) { a.to_victim.sender.sent = 1; },
      [](Attacked& a) { a.to_victim.sender.sent = cpu::p2p::kRingBytes + 64; },
      [](Attacked& a) { a.to_victim.sender.ring = Attacked::kSlice - 64; },
      [](Attacked& a) { a.to_victim.sender.ring = 3; },
      [](Attacked& a) { a.to_victim.sender.ring = kNotInWindow; },
  };
  for (const auto& change : changes) {
    Attacked attacked;
    attacked.open();
    change(attacked);
    const CollectiveError error = attacked.error_of_recv();
    must(error.reason == Reason::malformed && error.rank == 1, error.what());
  }
}

void blames_the_sender_of_malformed_answers() {
  const std::vector<Answer> answers = {
      {0, kNotInWindow, 0, AnswerKind::accept}, {1, kNotInWindow, 1, AnswerKind::accept},
      {0, kNotInWindow, 1, AnswerKind::taken},  {0, kNotInWindow, 1, static_cast<AnswerKind>(9)},
      {0, 64, 1, AnswerKind::accept},           {0, Attacked::kSlice - 100, 1, AnswerKind::accept},
  };
  for (Answer answer : answers) {
    Attacked attacked;
    if (answer.context == 1) answer.context = attacked.window->id();
    const Bytes data(100000);
    const RequestPtr request = isend(attacked.victim, data, 1);
    Mailbox& mailbox = attacked.window->mailbox(1, 0);
    std::byte* const ring = attacked.window->in_heap(0, mailbox.sender.ring, 1);
    std::memcpy(ring + cpu::p2p::kRingBytes, &answer, sizeof(answer));
    mailbox.receiver.answered = 1;
    const CollectiveError error = error_of([&] { request->wait(); });
    must(error.reason == Reason::malformed && error.rank == 1, error.what());
  }
}

// Whatever is in the ring, a receive ends, and touches no memory that is not its own.
void survives_random_frames() {
  for (unsigned seed = 0; seed < 300; ++seed) {
    Dice dice(seed);
    Attacked attacked;
    attacked.open();
    std::byte* at = attacked.ring;
    const int frames = 1 + static_cast<int>(roll(dice, 5));
    for (int i = 0; i < frames; ++i) {
      Frame frame = attacked.frame(static_cast<FrameKind>(roll(dice, 4)), roll(dice, 300));
      frame.message = static_cast<std::uint64_t>(roll(dice, 3));
      frame.tag = static_cast<std::int32_t>(roll(dice, 2));
      if (roll(dice, 4) == 0) frame.bytes = roll(dice, 1 << 20);
      if (roll(dice, 4) == 0) frame.offset = roll(dice, Attacked::kSlice);
      if (roll(dice, 4) == 0) {
        reinterpret_cast<std::byte*>(&frame)[roll(dice, sizeof(frame))] ^= std::byte{0x41};
      }
      std::memcpy(at, &frame, sizeof(frame));
      at += 64 * (1 + roll(dice, 4));
    }
    attacked.to_victim.sender.sent = static_cast<std::uint64_t>(at - attacked.ring);
    try {
      for (int i = 0; i < 6; ++i) recv(attacked.victim, roll(dice, 300), 1);
    } catch (const CollectiveError&) {
    }
  }
}

// The counters and the ring wrap around, and a full ring takes no more.
void ring_wraps_around() {
  alignas(64) static std::byte memory[cpu::p2p::kAllocationBytes];
  Mailbox mailbox{};
  const std::uint64_t start = std::uint64_t{0} - 64 * 1001;
  mailbox.sender.sent = mailbox.receiver.taken = start;
  mailbox.sender.answers_taken = mailbox.receiver.answered = ~std::uint64_t{0};
  SenderEnd sender(mailbox, memory);
  ReceiverEnd receiver(mailbox, memory, 7, {0, 1});
  Dice dice(1);
  std::vector<Bytes> expected;
  std::size_t next = 0;
  for (int i = 0; i < 3000; ++i) {
    Bytes data = content(0, i, roll(dice, 5000));
    const Frame frame{
        7,           FrameKind::eager, Element::u8, i, 0, static_cast<std::int64_t>(data.size()),
        kNotInWindow};
    while (sender.room() < length_of(frame) || roll(dice, 3) == 0) {
      Frame got;
      sender.publish();
      if (!receiver.next(got)) break;
      Bytes payload(static_cast<std::size_t>(got.bytes));
      receiver.read_payload(got, payload.data());
      receiver.release(got);
      must(payload == expected[next] && got.tag == static_cast<int>(next), "frames in order");
      ++next;
    }
    sender.write(frame, data.data());
    expected.push_back(std::move(data));
  }
  must(next > 2000, "most frames were read");
  int answers = 0;
  while (receiver.answer({static_cast<std::uint64_t>(answers), 0, 0, AnswerKind::accept}))
    ++answers;
  must(answers == cpu::p2p::kAnswers, "the queue of answers has an end");
  Answer answer{};
  for (int i = 0; i < answers; ++i) {
    must(sender.next(answer) && answer.message == static_cast<std::uint64_t>(i),
         "answers in order");
  }
  must(!sender.next(answer), "no more answers");
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm::test;
  return run_all({
      {"mismatch_names_both_sides", mismatch_names_both_sides},
      {"times_out", times_out},
      {"any_source_times_out", any_source_times_out},
      {"a_receive_from_itself_times_out", a_receive_from_itself_times_out},
      {"a_send_times_out", a_send_times_out},
      {"notices_who_leaves", notices_who_leaves},
      {"a_receive_that_nobody_waits_for_ends_alone", a_receive_that_nobody_waits_for_ends_alone},
      {"abort_ends_all", abort_ends_all},
      {"refuses_operations_without_a_thread", refuses_operations_without_a_thread},
      {"fails_if_a_small_send_needs_a_thread", fails_if_a_small_send_needs_a_thread},
      {"blames_the_sender_of_malformed_frames", blames_the_sender_of_malformed_frames},
      {"blames_the_sender_when_a_receive_is_posted", blames_the_sender_when_a_receive_is_posted},
      {"blames_the_writer_of_impossible_counters", blames_the_writer_of_impossible_counters},
      {"blames_the_sender_of_malformed_answers", blames_the_sender_of_malformed_answers},
      {"survives_random_frames", survives_random_frames},
      {"ring_wraps_around", ring_wraps_around},
  });
}
