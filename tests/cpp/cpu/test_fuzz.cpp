// Parsers of data from other processes, or of shared memory, survive any bytes, and accept nothing
// that later code could not use. Inputs are random bytes, and valid ones with a few changes. They
// have their exact size, for AddressSanitizer. For encoded elements and lists, see
// cpu/test_codec.cpp.
#include <unistd.h>

#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/algorithms/packet.h"
#include "core/codecs/wire.h"
#include "core/errors.h"
#include "core/message.h"
#include "cpu/executor/comm.h"
#include "support/dice.h"
#include "support/run_all.h"

namespace pycomm::test {
namespace {

using Bytes = std::vector<std::byte>;

constexpr int kInputs = 100'000;
constexpr int kRanks = 6;

template <class Value>
Bytes bytes_of(const Value& value) {
  const auto bytes = std::as_bytes(std::span(&value, 1));
  return {bytes.begin(), bytes.end()};
}

// Unlike PYCOMM_CHECK, throws an exception that no parser may throw.
void must(bool holds, const char* otherwise) {
  if (!holds) throw std::runtime_error(otherwise);
}

// A valid input with a few changes, an input of another length, or noise.
Bytes mutated(Dice& dice, const Bytes& valid) {
  Bytes bytes = valid;
  const std::size_t way = roll(dice, 8);
  if (way == 0) bytes = Bytes(valid.begin(), valid.begin() + roll(dice, valid.size()));
  if (way == 1) bytes.resize(valid.size() + 1 + roll(dice, 200));
  if (way == 2) {
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(dice());
  }
  for (std::size_t times = roll(dice, 4); times > 0 && !bytes.empty(); --times) {
    constexpr std::uint64_t kWorst[] = {0, 1, 0x7f, 0x80, 0xff, 0x7fffffff, 0x80000000, ~0ull};
    const std::uint64_t word = roll(dice, 2) == 0 ? kWorst[roll(dice, 8)] : dice();
    const std::size_t at = roll(dice, bytes.size());
    const std::size_t size = std::min<std::size_t>(1ull << roll(dice, 4), bytes.size() - at);
    std::memcpy(bytes.data() + at, &word, size);
  }
  bytes.shrink_to_fit();
  return bytes;
}

// Passes mutations of a valid input to use(bytes), which throws std::invalid_argument or uses the
// parsed value as the group would.
template <class Use>
void fuzz(const Bytes& valid, Use use) {
  Dice dice(valid.size());
  use(std::span<const std::byte>(valid));
  int refusals = 0;
  for (int i = 0; i < kInputs; ++i) {
    const Bytes bytes = mutated(dice, valid);
    refusals += refused([&] { use(std::span<const std::byte>(bytes)); });
  }
  PYCOMM_CHECK(refusals > kInputs / 10 && refusals < kInputs,
               std::to_string(refusals) + " of " + std::to_string(kInputs) + " were refused");
}

Sender any_sender() {
  Sender sender{{}, 3};
  sender.secret.fill(std::byte{0x5a});
  return sender;
}

Operation any_operation() {
  Operation operation;
  operation.collective = Collective::all_reduce;
  operation.algorithm = Algorithm::two_shot;
  operation.dtype = DType::bf16;
  operation.count = 5000;
  operation.codec.kind = CodecKind::topk;
  operation.codec.k = 50;
  return operation;
}

// Looks the operation up in tables of names.
void use(const Operation& operation) {
  must(describe(operation).find("unknown") == std::string::npos,
       "an operation that does not exist was let through");
}

void handshakes() {
  const Sender sender = any_sender();
  const Handshake valid{header_of(MessageKind::handshake, sender), any_operation(), 7, {}};
  fuzz(bytes_of(valid), [&](std::span<const std::byte> bytes) {
    const Handshake handshake = parse_handshake(bytes, sender);
    must(handshake.header.secret == sender.secret, "a secret was not compared");
    use(handshake.operation);
  });
}

void farewells() {
  const Sender sender = any_sender();
  const std::vector<int> pids(kRanks, 1);
  const Farewell valid{header_of(MessageKind::farewell, sender), abort_word(Reason::timeout, 5)};
  fuzz(bytes_of(valid), [&](std::span<const std::byte> bytes) {
    const std::uint64_t word = parse_farewell(bytes, sender, kRanks).abort_word;
    if (word == 0) return;
    const int pid = pids.at(static_cast<std::size_t>(rank_of(word)));
    const CollectiveError error = failure(reason_of(word), rank_of(word), pid, any_operation(), 1);
    must(error.reason > Reason::none && error.reason <= Reason::returned,
         "a reason that does not exist was let through");
  });
}

int node_of(int rank) { return rank / 2; }

void introductions() {
  Sender sender = any_sender();
  sender.node = node_of(4);
  const Introduction valid{header_of(MessageKind::introduction, sender), 4};
  const std::vector<int> nodes{0, 0, 1, 1, 2, 2};
  fuzz(bytes_of(valid), [&](std::span<const std::byte> bytes) {
    const Introduction said = parse_introduction(bytes, sender.secret, kRanks, node_of);
    must(said.header.node == nodes.at(static_cast<std::size_t>(said.rank)),
         "a rank of another node was let through");
    must(said.header.secret == sender.secret, "a secret was not compared");
  });
}

void streamed_frames() {
  using cpu::p2p::Frame;
  using cpu::p2p::FrameKind;
  for (const FrameKind kind : {FrameKind::eager, FrameKind::announce, FrameKind::data}) {
    const Frame valid{cpu::p2p::kStreamContext, kind, Element::f32, 1, 0, 400, kNotInWindow};
    fuzz(bytes_of(valid), [&](std::span<const std::byte> bytes) {
      PYCOMM_CHECK(bytes.size() == sizeof(Frame), "a frame has one length");
      Frame frame;
      std::memcpy(&frame, bytes.data(), sizeof(frame));
      check_streamed_frame(frame);
      must(size_of(frame.element) > 0, "a type that does not exist was let through");
      must(frame.bytes >= 0 && payload_of(frame) <= cpu::p2p::kStreamedBytes,
           "a payload without a limit was let through");
    });
  }
}

// A message for one link that arrives on another one.
void messages_of_others() {
  const Sender sender = any_sender();
  const Handshake handshake{header_of(MessageKind::handshake, sender), any_operation(), 7, {}};
  const Farewell farewell{header_of(MessageKind::farewell, sender), 0};
  Sender stranger = sender, neighbour = sender;
  stranger.secret[15] ^= std::byte{1};
  neighbour.node = 2;
  for (const Sender& other : {stranger, neighbour}) {
    must(refused([&] { parse_handshake(bytes_of(handshake), other); }), "another's handshake");
    must(refused([&] { parse_farewell(bytes_of(farewell), other, kRanks); }), "another's farewell");
  }
}

void wire_headers() {
  Codec codec;
  codec.kind = CodecKind::topk;
  const std::int64_t n = 5000;
  fuzz(bytes_of(header_of(codec, n)), [&](std::span<const std::byte> bytes) {
    WireHeader header;
    if (bytes.size() >= sizeof(header)) std::memcpy(&header, bytes.data(), sizeof(header));
    check_header(codec, header, static_cast<std::int64_t>(bytes.size()), n);
  });
}

void announcements() {
  constexpr std::int64_t kHeapBegin = 8192, kHeapEnd = 1 << 20;
  Announcement valid;
  valid.operation = any_operation();
  valid.operation.codec = {};
  valid.operation.collective = Collective::reduce_scatter;
  valid.input = kHeapBegin;
  valid.output = kHeapEnd - valid.operation.count * 2;
  fuzz(bytes_of(valid), [&](std::span<const std::byte> bytes) {
    const Announcement read = parse_announcement(bytes, kRanks, 1, kHeapBegin, kHeapEnd);
    use(read.operation);
    must(read.operation.count <= kMostElements, "a count whose bytes overflow was let through");
    const bool lists = read.operation.codec.kind == CodecKind::topk;
    const auto check = [&](std::int64_t place, std::int64_t size) {
      must(place == kNotInWindow || (place >= kHeapBegin && place <= kHeapEnd),
           "a place outside the heap was let through");
      must(place == kNotInWindow || lists || place + size <= kHeapEnd,
           "a tensor beyond the heap was let through");
    };
    check(read.input, input_bytes(read.operation, kRanks, 1));
    check(read.output, output_bytes(read.operation, kRanks, 1));
  });
}

// Any word is accepted, but few words name a rank.
void waits() {
  Dice dice(5);
  const std::vector<int> channels(kPacket + 1), ranks(kRanks);
  const Waiting valid{kRanks - 1, kPacket, 77};
  const auto same = parse_waiting(waiting_word(valid), kRanks);
  must(same && same->rank == valid.rank && same->channel == valid.channel &&
           same->target == valid.target,
       "a word is read as another one");
  for (int i = 0; i < kInputs; ++i) {
    const std::uint64_t shift = roll(dice, 64);
    const auto waiting = parse_waiting(dice() >> shift, kRanks);
    if (!waiting) continue;
    ranks.at(static_cast<std::size_t>(waiting->rank));
    channels.at(static_cast<std::size_t>(waiting->channel));
  }
}

// Only the operation's own packets count, whatever their place contained before.
void packets() {
  Dice dice(4);
  for (int i = 0; i < kInputs; ++i) {
    const std::uint32_t sequence = next_sequence(static_cast<std::uint32_t>(dice()));
    const auto data = static_cast<std::uint32_t>(dice());
    const std::uint64_t packet = make_packet(data, sequence);
    must(packet_sequence(packet) == sequence && packet_data(packet) == data,
         "a packet is not what was put");
    const std::uint64_t other = packet ^ (1ull << (32 + roll(dice, 32)));
    must(packet_sequence(other) != sequence, "another operation's packet was taken");
  }
}

// Rank 0 of two; this test plays rank 1. A tensor of each fills its heap.
class Neighbourhood {
 public:
  cpu::Control& control(int r) const { return window_->control(r); }
  std::byte* tensor(int r) const { return tensors_[r]; }
  std::int64_t heap_begin() const { return window_->heap_begin(); }
  std::int64_t place(int r, const std::byte* data) const {
    return window_->place_in_heap(r, data, 0);
  }

  std::unique_ptr<cpu::Comm> rank0(cpu::Clock::duration timeout) const {
    control(0).abort = 0;
    return std::make_unique<cpu::Comm>(window_, peers_, 0, 2, 1, timeout, 0);
  }

 private:
  static constexpr std::int64_t kSlice = 1 << 20, kStaging = 1 << 14;

  std::byte* allocate(int r) const {
    return window_->heap(r)->allocate(kSlice - window_->heap_begin());
  }

  std::shared_ptr<cpu::Window> window_ =
      std::make_shared<cpu::Window>(cpu::Window::create(2, kSlice, kStaging), 2, kSlice, kStaging);
  std::byte* tensors_[2] = {allocate(0), allocate(1)};
  std::shared_ptr<const cpu::Liveness> peers_ = std::make_shared<const cpu::Liveness>(
      std::vector<int>{1, 1}, std::vector<std::shared_ptr<cpu::Process>>(2));
};

// After any announcement of the neighbour, either the operation fails and blames it, or the
// announced tensor lies in its slice.
void announcements_in_a_window() {
  Dice dice(6);
  const Neighbourhood here;
  Operation operation;
  operation.collective = Collective::all_gather;
  operation.count = 1000;
  Announcement valid;
  valid.operation = operation;
  valid.output = here.heap_begin();
  int accepted = 0;
  for (int i = 0; i < kInputs / 10; ++i) {
    const auto comm = here.rank0(std::chrono::seconds(60));
    const std::uint32_t sequence = next_sequence(0);
    Bytes line = mutated(dice, bytes_of(valid));
    line.resize(sizeof(valid));
    Announcement& theirs = here.control(1).announcements[sequence & 1u];
    std::memcpy(&theirs, line.data(), line.size());
    theirs.epoch = sequence;
    comm->begin(operation, here.tensor(0), here.tensor(0), nullptr);
    try {
      comm->announce();
      ++accepted;
      if (!comm->zero_copy()) continue;
      const std::int64_t place = here.place(1, comm->output(1).data);
      must(place >= here.heap_begin() && place <= (1 << 20) - 2 * operation.count,
           "a tensor outside the neighbour's heap is used");
    } catch (const CollectiveError& error) {
      must(error.rank == 1 &&
               (error.reason == Reason::malformed || error.reason == Reason::mismatch),
           "the error names somebody else");
    }
  }
  must(accepted > 0 && accepted < kInputs / 10, "all or none were accepted");
}

// The same for any other word that the neighbour writes.
void words_in_a_window() {
  Dice dice(7);
  const Neighbourhood here;
  for (int i = 0; i < kInputs / 10; ++i) {
    const auto comm = here.rank0(std::chrono::seconds(0));
    here.control(1).waiting = dice() >> roll(dice, 64);
    if (i % 2 == 0) here.control(0).abort = (dice() | 1) >> roll(dice, 63);
    try {
      comm->begin({}, nullptr, nullptr, nullptr);
      comm->announce();
      must(false, "an operation without its second rank has succeeded");
    } catch (const CollectiveError& error) {
      must(error.rank >= -1 && error.rank < 2, "the error names no rank");
    }
  }
}

void window_headers() {
  constexpr std::int64_t kSlice = 1 << 18, kStaging = 1 << 14;
  const int fd = cpu::Window::create(1, kSlice, kStaging);
  Bytes valid(sizeof(cpu::Header));
  must(pread(fd, valid.data(), valid.size(), 0) == static_cast<ssize_t>(valid.size()), "pread");
  valid.resize(offsetof(cpu::Header, staging_bytes) + sizeof(std::int64_t));
  Dice dice(8);
  for (int i = 0; i < kInputs / 10; ++i) {
    Bytes header = mutated(dice, valid);
    header.resize(valid.size());
    must(pwrite(fd, header.data(), header.size(), 0) == static_cast<ssize_t>(header.size()),
         "pwrite");
    must(refused([&] { cpu::Window(dup(fd), 1, kSlice, kStaging); }) == (header != valid),
         "another header was accepted, or its own refused");
  }
  close(fd);
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm::test;
  return run_all({
      {"handshakes", handshakes},
      {"farewells", farewells},
      {"introductions", introductions},
      {"streamed frames", streamed_frames},
      {"messages of others", messages_of_others},
      {"announcements", announcements},
      {"waits", waits},
      {"wire headers", wire_headers},
      {"packets", packets},
      {"announcements in a window", announcements_in_a_window},
      {"words in a window", words_in_a_window},
      {"window headers", window_headers},
  });
}
