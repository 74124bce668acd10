// Messages between devices, which are in host memory here and do their work as late as they can.
#include <atomic>
#include <cstring>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "support/messages.h"
#include "support/world.h"

namespace pycomm::test {
namespace {

constexpr std::int64_t kSlotBytes = 2 << 20, kSlots = 2, kBegin = 4096;

// A rank's device. A copy is done when it is looked at for the last time, not before.
class SlowDevice final : public DeviceCopies {
 public:
  SlowDevice(std::vector<Bytes>& windows, int rank, int looks)
      : windows_(windows), rank_(rank), looks_(looks) {}

  // Memory that other ranks can use.
  std::byte* heap() { return window(rank_) + kBegin + kSlots * kSlotBytes; }
  std::int64_t running() const { return static_cast<std::int64_t>(copies_.size()); }

  int device() const override { return 0; }
  void make_current() const noexcept override {}
  Range slots() const override { return {kBegin, kSlots * kSlotBytes}; }
  std::int64_t place_of(const void* data, std::int64_t bytes) const override {
    const std::int64_t place = static_cast<const std::byte*>(data) - window(rank_);
    const auto end = static_cast<std::int64_t>(windows_[0].size());
    return place >= kBegin && place + bytes <= end ? place : kNotInWindow;
  }
  // A stream is a flag: true if it has done its work. Null has.
  Mark mark(std::uintptr_t stream) override {
    if (stream == 0) return nullptr;
    return std::make_shared<Copy>(Copy{reinterpret_cast<std::atomic<bool>*>(stream), 0, {}});
  }
  bool passed(Mark& mark) override {
    Copy& copy = *static_cast<Copy*>(mark.get());
    if (copy.stream != nullptr ? !copy.stream->load() : --copy.looks > 0) return false;
    end(copy);
    mark.reset();
    return true;
  }
  Mark put(std::int64_t place, const void* from, std::int64_t bytes) override {
    return start(window(rank_) + place, from, bytes);
  }
  Mark fetch(void* to, int rank, std::int64_t place, std::int64_t bytes) override {
    PYCOMM_CHECK(place >= kBegin, "outside");
    return start(to, window(rank) + place, bytes);
  }
  void finish() noexcept override {
    while (!copies_.empty()) end(*copies_.front());
  }

 private:
  struct Copy {
    std::atomic<bool>* stream;
    int looks;
    std::function<void()> work;
  };

  std::byte* window(int rank) const { return windows_[static_cast<std::size_t>(rank)].data(); }
  Mark start(void* to, const void* from, std::int64_t bytes) {
    copies_.push_back(std::make_shared<Copy>(
        Copy{nullptr, looks_, [=] { std::memcpy(to, from, static_cast<std::size_t>(bytes)); }}));
    return copies_.back();
  }
  void end(Copy& copy) {
    if (copy.work) copy.work();
    copies_.remove_if([&](const auto& each) { return each.get() == &copy; });
  }

  std::vector<Bytes>& windows_;
  const int rank_;
  const int looks_;
  std::list<std::shared_ptr<Copy>> copies_;
};

struct Devices {
  explicit Devices(int ranks, int looks = 3, double timeout = 60)
      : windows(static_cast<std::size_t>(ranks), Bytes(kBegin + (kSlots + 5) * kSlotBytes)),
        world(ranks, 64 << 10, 0, timeout) {
    for (int r = 0; r < ranks; ++r) {
      of.push_back(std::make_shared<SlowDevice>(windows, r, looks));
      world[r].serve_device(of.back());
    }
    for (int r = 0; r < ranks; ++r) world[r].send_on_device();
  }
  RequestPtr isend(int r, std::byte* data, std::int64_t bytes, int to, int tag = 0,
                   std::atomic<bool>* stream = nullptr) {
    must(world[r].reaches(0, to, bytes), "the message can stay on devices");
    Options options{.on_device = data, .stream = reinterpret_cast<std::uintptr_t>(stream)};
    return world[r].isend(nullptr, envelope(to, tag, bytes), options);
  }
  RequestPtr irecv(int r, Bytes& on_device, Bytes& on_host, int from, int tag = 0) {
    const auto bytes = static_cast<std::int64_t>(on_device.size());
    return world[r].irecv(on_host.data(), envelope(from, tag, bytes),
                          {.on_device = on_device.data()});
  }

  std::vector<Bytes> windows;
  std::vector<std::shared_ptr<SlowDevice>> of;
  World world;
};

constexpr std::int64_t kSizes[] = {(16 << 10) + 1, 1 << 20, kSlots* kSlotBytes, 5 * kSlotBytes - 3};
enum class From { host, device, heap };

// Both ranks send at once, from and to wherever.
void all_places() {
  Devices devices(2);
  devices.world.run([&](int r) {
    int number = 0;
    for (const From from : {From::host, From::device, From::heap}) {
      for (const bool to_device : {false, true}) {
        for (const std::int64_t bytes : kSizes) {
          Bytes data = content(r, ++number, bytes);
          Bytes on_device(data.size()), on_host(data.size());
          const int peer = 1 - r;
          if (from == From::heap) std::memcpy(devices.of[r]->heap(), data.data(), data.size());
          const RequestPtr sent =
              from == From::host
                  ? isend(devices.world[r], data, peer)
                  : devices.isend(r, from == From::heap ? devices.of[r]->heap() : data.data(),
                                  bytes, peer);
          const RequestPtr received = to_device ? devices.irecv(r, on_device, on_host, kAnySource)
                                                : irecv(devices.world[r], on_host, peer);
          received->wait();
          sent->wait();
          const bool stays = to_device && from != From::host;
          must(received->arrived_on_device == stays, "a message arrives where it can");
          must(received->source == peer, "a receive knows its source");
          must((stays ? on_device : on_host) == content(peer, number, bytes), "the bytes arrive");
        }
      }
    }
  });
}

// More messages than slots, to several ranks, received in another order.
void messages_share_slots() {
  constexpr int kEach = 4;
  constexpr std::int64_t kBytes = 2 * kSlotBytes + 77;
  Devices devices(3);
  devices.world.run([&](int r) {
    std::vector<Bytes> sent, received, on_host;
    std::vector<RequestPtr> requests;
    for (int i = 0; i < kEach; ++i) {
      for (int p = 0; p < 3; ++p) {
        sent.push_back(content(r, 10 * p + i, kBytes));
        received.emplace_back(kBytes);
        on_host.emplace_back(kBytes);
      }
    }
    for (int i = 0; i < 3 * kEach; ++i) {
      if (i % 3 != r) requests.push_back(devices.isend(r, sent[i].data(), kBytes, i % 3, i / 3));
    }
    for (int i = 3 * kEach - 1; i >= 0; --i) {
      if (i % 3 != r) requests.push_back(devices.irecv(r, received[i], on_host[i], i % 3, i / 3));
    }
    for (const RequestPtr& request : requests) request->wait();
    for (int i = 0; i < 3 * kEach; ++i) {
      must(i % 3 == r || received[i] == content(i % 3, 10 * r + i / 3, kBytes), "each its bytes");
    }
  });
}

// What the stream has still to do counts, and later messages overtake the one that waits for it.
void a_send_waits_for_its_stream() {
  Devices devices(2);
  constexpr std::int64_t kBytes = 100000;
  for (const bool in_heap : {false, true}) {
    std::atomic<bool> done = false;
    Bytes memory(kBytes), received(kBytes), on_host(kBytes);
    std::byte* const data = in_heap ? devices.of[0]->heap() : memory.data();
    const RequestPtr sent = devices.isend(0, data, kBytes, 1, 1, &done);
    const RequestPtr receive = devices.irecv(1, received, on_host, 0, 1);
    send(devices.world[0], content(0, 1, 5), 1);
    must(recv(devices.world[1], 5, 0) == content(0, 1, 5), "a small message overtakes");
    must(!receive->wait(std::chrono::milliseconds(20)), "nothing has arrived yet");
    std::memcpy(data, content(0, 2, kBytes).data(), kBytes);
    done = true;
    receive->wait();
    sent->wait();
    must(received == content(0, 2, kBytes), "what the stream has written arrives");
  }
}

// A caller frees its memory when it gets the error.
void copies_end_before_a_request_fails() {
  Devices devices(2, 1 << 30);
  constexpr std::int64_t kBytes = 100000;
  Bytes on_host(kBytes), received(kBytes), data = content(0, 1, kBytes);
  std::memcpy(devices.of[0]->heap(), data.data(), kBytes);
  const RequestPtr receive = devices.irecv(1, received, on_host, 0);
  const RequestPtr in_place = devices.isend(0, devices.of[0]->heap(), kBytes, 1);
  const RequestPtr through_slots = devices.isend(0, data.data(), kBytes, 1);
  const RequestPtr second = devices.irecv(1, received, on_host, 0);
  must(!second->wait(std::chrono::milliseconds(50)), "copies do not end by themselves");
  must(!in_place->wait(std::chrono::milliseconds(1)), "it is not taken");
  devices.world[0].abort();
  for (const RequestPtr& request : {receive, in_place, through_slots, second}) {
    const CollectiveError error = error_of([&] { request->wait(); });
    must(error.reason == Reason::aborted && error.rank == 0, error.what());
    must(devices.of[request->receives]->running() == 0, "no copy runs any more");
  }
  must(received == data, "the copy that had begun was waited for");
}

// A device that does not go on: the receiver's timeout ends it.
void a_stream_that_stands_still_times_out() {
  Devices devices(2, 3, 0.3);
  std::atomic<bool> done = false;
  Bytes data(100000), received(data.size()), on_host(data.size());
  const RequestPtr sent = devices.isend(0, data.data(), 100000, 1, 0, &done);
  const CollectiveError error = error_of([&] { devices.irecv(1, received, on_host, 0)->wait(); });
  must(error.reason == Reason::timeout && error.rank == 0, error.what());
  must(error_of([&] { sent->wait(); }).reason == Reason::timeout, "the sender gets it, too");
}

void reaches_only_other_ranks_devices() {
  Devices devices(2);
  World without(2);
  must(devices.world[0].reaches(0, 1, kSlotBytes), "another rank");
  must(devices.world[0].reaches(0, kAnySource, kSlotBytes), "any rank");
  for (const int peer : {0, 2, -2}) {
    must(!devices.world[0].reaches(0, peer, kSlotBytes), "itself, or no rank");
  }
  must(!devices.world[0].reaches(1, 1, kSlotBytes), "another device");
  must(!devices.world[0].reaches(0, 1, 16 << 10), "small messages do not wait");
  must(!without[0].reaches(0, 1, kSlotBytes), "no device");
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm::test;
  return run_all({
      {"all_places", all_places},
      {"messages_share_slots", messages_share_slots},
      {"a_send_waits_for_its_stream", a_send_waits_for_its_stream},
      {"copies_end_before_a_request_fails", copies_end_before_a_request_fails},
      {"a_stream_that_stands_still_times_out", a_stream_that_stands_still_times_out},
      {"reaches_only_other_ranks_devices", reaches_only_other_ranks_devices},
  });
}
