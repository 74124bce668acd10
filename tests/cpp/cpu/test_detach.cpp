// A group that fails may take a tensor's pages from other processes, while a message or a collective
// of a healthy group uses them. What that group moves is then right, or it raises an error.
#include <sys/mman.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <optional>
#include <thread>

#include "cpu/p2p/ring.h"
#include "support/messages.h"
#include "support/world.h"

namespace pycomm::test {
namespace {

using cpu::kPage;
using cpu::Window;
using cpu::p2p::Answer;
using cpu::p2p::AnswerKind;
using cpu::p2p::Frame;
using cpu::p2p::FrameKind;
using cpu::p2p::SenderEnd;

constexpr std::int64_t kSlice = 64 << 20, kStaging = 256 << 10, kBytes = 16 * kPage;

// Another process: it runs until the test ends.
class Child {
 public:
  Child() : pid_(fork()) {
    if (pid_ == 0) {
      pause();
      _exit(0);
    }
  }
  ~Child() { kill(pid_, SIGKILL); }
  int pid() const { return pid_; }

 private:
  const int pid_;
};

// A window of two ranks that each of them maps for itself, as processes do.
struct Pair {
  std::vector<std::shared_ptr<Window>> windows;
  std::vector<std::unique_ptr<cpu::Group>> groups;

  // If `other` is given, rank 1 is that process.
  explicit Pair(const Child* other = nullptr) {
    const int fd = Window::create(2, kSlice, kStaging);
    for (const int file : {fd, dup(fd)}) {
      windows.push_back(std::make_shared<Window>(file, 2, kSlice, kStaging));
    }
    std::vector<std::shared_ptr<cpu::Process>> processes(2);
    if (other != nullptr) processes[1] = cpu::Process::find(other->pid());
    const auto peers =
        std::make_shared<const cpu::Liveness>(std::vector{0, 0}, std::move(processes));
    for (int r = 0; r < (other == nullptr ? 2 : 1); ++r) {
      groups.push_back(std::make_unique<cpu::Group>(windows[static_cast<std::size_t>(r)], peers, r,
                                                    2, 2, std::chrono::seconds(60), 0));
    }
  }
  std::byte* allocate(int r, std::int64_t bytes = kBytes) const {
    return windows[static_cast<std::size_t>(r)]->heap(r)->allocate(bytes);
  }
  // Another group of rank r fails, whose tensor has this page.
  void detach(int r, const std::byte* page) const {
    const Window& window = *windows[static_cast<std::size_t>(r)];
    window.detach(r, {window.place_in_heap(r, page, 1), kPage});
  }
  void run(const std::function<void(int)>& body) {
    std::exception_ptr failed;
    std::thread other([&] {
      try {
        body(1);
      } catch (...) {
        failed = std::current_exception();
        groups[1]->abort();
      }
    });
    try {
      body(0);
    } catch (...) {
      failed = std::current_exception();
      groups[0]->abort();
    }
    other.join();
    if (failed) std::rethrow_exception(failed);
  }
};

bool holds(const std::byte* data, const Bytes& expected) {
  return std::memcmp(data, expected.data(), expected.size()) == 0;
}

// The test is the sender, rank 1. The page is taken before, between or after its two halves.
void a_receive_is_whole_or_fails() {
  for (const int when : {0, 1, 2}) {
    Pair pair;
    const Window& theirs = *pair.windows[1];
    std::byte* const buffer = pair.allocate(0);
    const RequestPtr receive = pair.groups[0]->irecv(buffer, envelope(1, 0, kBytes));

    std::byte* const ring = pair.allocate(1, cpu::p2p::kAllocationBytes);
    cpu::p2p::Mailbox& mailbox = theirs.mailbox(0, 1);
    SenderEnd sender(mailbox, ring);
    mailbox.sender.ring = theirs.place_in_heap(1, ring, cpu::p2p::kAllocationBytes);
    Frame frame{theirs.id(), FrameKind::announce, Element::u8, 0, 0, kBytes, kNotInWindow};
    sender.write(frame);
    sender.publish();
    Answer answer{};
    while (!sender.next(answer)) receive->wait(std::chrono::milliseconds(1));
    must(answer.kind == AnswerKind::accept && answer.offset != kNotInWindow, "a direct delivery");

    const Bytes message = content(1, when, kBytes);
    std::byte* const to = theirs.in_heap(0, answer.offset, kBytes);
    for (int half = 0; half < 2; ++half) {
      if (when == half) pair.detach(0, buffer + kBytes / 2);
      const std::int64_t begin = half * kBytes / 2;
      std::memcpy(to + begin, message.data() + begin, kBytes / 2);
    }
    frame.kind = FrameKind::written;
    sender.write(frame);
    if (when == 2) pair.detach(0, buffer + kBytes / 2);
    sender.publish();
    try {
      receive->wait();
      must(holds(buffer, message), "a message that has arrived is whole");
    } catch (const CollectiveError& error) {
      must(error.reason == Reason::aborted && error.rank == 0, error.what());
      must(std::string(error.what()).find("another group") != std::string::npos, error.what());
    }
  }
}

// The sender may not change the message, so what it has announced stays right.
void a_send_is_whole() {
  Pair pair;
  std::byte* const buffer = pair.allocate(0);
  const Bytes message = content(0, 1, kBytes);
  std::memcpy(buffer, message.data(), kBytes);
  const RequestPtr send = pair.groups[0]->isend(buffer, envelope(1, 0, kBytes - 100));
  pair.detach(0, buffer);
  buffer[kBytes - 1] ^= std::byte{1};  // another tensor
  pair.run([&](int r) {
    if (r == 0) return send->wait();
    must(holds(message.data(), recv(*pair.groups[1], kBytes - 100, 0)), "a wrong message");
  });
}

// Messages after the failure use the pages that the tensor has now.
void later_messages_are_whole() {
  Pair pair;
  std::byte* const buffer = pair.allocate(0);
  pair.detach(0, buffer);
  const Bytes first = content(0, 1, kBytes), second = content(1, 2, kBytes);
  pair.run([&](int r) {
    if (r == 0) {
      std::memcpy(buffer, first.data(), kBytes);
      pair.groups[0]->send(buffer, envelope(1, 0, kBytes));
      pair.groups[0]->recv(buffer, envelope(1, 0, kBytes));
      must(holds(buffer, second), "a wrong message");
    } else {
      must(recv(*pair.groups[1], kBytes, 0) == first, "a wrong message");
      send(*pair.groups[1], second, 0);
    }
  });
}

// Two groups fail one after the other. Their tensors lie side by side.
void a_tensor_may_be_taken_twice() {
  const Child child;
  Pair pair(&child);
  std::byte* const buffer = pair.allocate(0);
  const RequestPtr send = pair.groups[0]->isend(buffer, envelope(1, 0, kBytes));
  pair.windows[0]->control(1).p2p_in_peers_heaps = 1;  // rank 1 is stuck there
  pair.detach(0, buffer + kPage);
  buffer[kPage] = std::byte{5};
  pair.groups[0]->abort();
  const CollectiveError error = error_of([&] { send->wait(); });
  must(error.reason == Reason::aborted, error.what());
  must(buffer[kPage] == std::byte{5}, "a page is taken once");
}

// A rank that is stuck may write to the old place whenever it goes on.
void a_detached_place_is_not_used_again() {
  const Pair pair;
  std::byte* const old = pair.allocate(0);
  const std::int64_t place = pair.windows[0]->place_in_heap(0, old, kBytes);
  pair.detach(0, old);
  pair.windows[0]->heap(0)->free(old);
  std::byte* const next = pair.allocate(0);
  std::memset(pair.windows[1]->in_heap(0, place, kBytes), 7, kBytes);
  must(std::count(next, next + kBytes, std::byte{0}) == kBytes, "written to a later tensor");
}

// Rank 0's tensor is taken when rank 1 knows its place but has not used it.
void a_collective_is_right_or_fails(Algorithm algorithm) {
  constexpr std::int64_t kCount = kBytes / 4;
  Pair pair;
  Operation operation{};
  operation.collective = Collective::all_reduce;
  operation.algorithm = algorithm;
  operation.dtype = DType::f32;
  operation.count = kCount;
  pair.run([&](int r) {
    std::byte* const mine = pair.allocate(r, 2 * kBytes);
    auto* const data = reinterpret_cast<float*>(mine);
    std::fill(data, data + kCount, static_cast<float>(r + 1));
    std::jthread other;
    if (r == 0) {
      other = std::jthread([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        for (std::int64_t page = 0; page < kBytes / kPage; ++page) {
          pair.windows[0]->detach(0,
                                  {pair.windows[0]->heap_begin() + kBytes + page * kPage, kPage});
        }
      });
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    try {
      pair.groups[static_cast<std::size_t>(r)]->run(operation, data, data + kCount);
      must(std::count(data + kCount, data + 2 * kCount, 3.0f) == kCount,
           "a wrong sum on rank " + std::to_string(r));
    } catch (const CollectiveError& error) {
      must(error.reason == Reason::aborted && error.rank == 0, error.what());
    }
  });
}

void collectives_are_right_or_fail() {
  for (const Algorithm algorithm :
       {Algorithm::one_shot, Algorithm::two_shot, Algorithm::ring, Algorithm::tree}) {
    try {
      a_collective_is_right_or_fails(algorithm);
    } catch (const std::exception& error) {
      must(false, std::string(name_of(algorithm)) + ": " + error.what());
    }
  }
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm::test;
  return run_all({{"a receive is whole or fails", a_receive_is_whole_or_fails},
                  {"a send is whole", a_send_is_whole},
                  {"later messages are whole", later_messages_are_whole},
                  {"a tensor may be taken twice", a_tensor_may_be_taken_twice},
                  {"a detached place is not used again", a_detached_place_is_not_used_again},
                  {"collectives are right or fail", collectives_are_right_or_fail}});
}
