// Sends and receives between ranks that are threads.
#include <array>
#include <atomic>
#include <barrier>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "support/dice.h"
#include "support/messages.h"
#include "support/world.h"

namespace pycomm::test {
namespace {

constexpr std::int64_t kSizes[] = {
    0, 1, 63, 64, 65, 4096, 16 << 10, (16 << 10) + 1, 65536, 65537, 1 << 20, (3 << 20) + 5};

void all_sizes() {
  World world(2);
  world.run([&](int r) {
    int number = 0;
    for (const std::int64_t bytes : kSizes) {
      ++number;
      if (r == 0) {
        send(world[r], content(0, number, bytes), 1);
        must(recv(world[r], bytes, 1) == content(1, number, bytes), "0 must get 1's bytes");
      } else {
        must(recv(world[r], bytes, 0) == content(0, number, bytes), "1 must get 0's bytes");
        send(world[r], content(1, number, bytes), 0);
      }
    }
  });
}

void small_sends_cross() {
  World world(2);
  world.run([&](int r) {
    for (int i = 0; i < 20; ++i) {
      send(world[r], content(r, i, 8000), 1 - r);
      must(recv(world[r], 8000, 1 - r) == content(1 - r, i, 8000), "crossing sends");
    }
  });
}

void large_sends_cross() {
  World world(3);
  constexpr std::int64_t kBytes = 20 << 20;
  world.run([&](int r) {
    std::vector<Bytes> sent(3), received(3, Bytes(kBytes));
    std::vector<RequestPtr> requests;
    for (int p = 0; p < 3; ++p) {
      sent[p] = content(r, p, kBytes);
      requests.push_back(isend(world[r], sent[p], p));
    }
    for (int p = 0; p < 3; ++p) requests.push_back(irecv(world[r], received[p], p));
    for (const RequestPtr& request : requests) request->wait();
    for (int p = 0; p < 3; ++p) must(received[p] == content(p, r, kBytes), "crossing sends");
  });
}

void tags_out_of_order() {
  World world(2);
  world.run([&](int r) {
    const std::vector<std::int64_t> sizes = {10, 100000, 0, 20000, 1 << 20, 5};
    const int n = static_cast<int>(sizes.size());
    if (r == 0) {
      std::vector<Bytes> data;
      std::vector<RequestPtr> requests;
      for (int t = 0; t < n; ++t) data.push_back(content(0, t, sizes[t]));
      for (int t = 0; t < n; ++t) requests.push_back(isend(world[0], data[t], 1, t));
      for (const RequestPtr& request : requests) request->wait();
    } else {
      for (int t = n - 1; t >= 0; --t) {
        must(recv(world[1], sizes[t], 0, t) == content(0, t, sizes[t]), "tags out of order");
      }
    }
  });
}

void messages_of_a_tag_keep_their_order() {
  World world(2);
  world.run([&](int r) {
    constexpr int kMessages = 200;
    const auto size = [](int i) { return i % 3 == 0 ? 40000 : i % 7; };
    if (r == 0) {
      std::vector<Bytes> data;
      std::vector<RequestPtr> requests;
      for (int i = 0; i < kMessages; ++i) data.push_back(content(0, i, size(i)));
      for (int i = 0; i < kMessages; ++i) requests.push_back(isend(world[0], data[i], 1));
      for (const RequestPtr& request : requests) request->wait();
    } else {
      for (int i = 0; i < kMessages; ++i) {
        must(recv(world[1], size(i), 0) == content(0, i, size(i)), "in order");
      }
    }
  });
}

void any_source() {
  World world(4);
  world.run([&](int r) {
    constexpr int kEach = 30;
    const auto size = [](int i) { return i % 4 == 0 ? 30000 : 12; };
    if (r != 0) {
      std::vector<Bytes> data;
      std::vector<RequestPtr> requests;
      for (int i = 0; i < kEach; ++i) data.push_back(content(r, i, 30000));
      for (int i = 0; i < kEach; ++i) requests.push_back(isend(world[r], data[i], 0, size(i)));
      for (const RequestPtr& request : requests) request->wait();
      return;
    }
    for (const int tag : {12, 30000}) {
      std::array<int, 4> next = {};
      for (int i = 0; i < 3 * kEach; ++i) {
        if (size(i % kEach) != tag) continue;
        Bytes data(30000);
        const int source = world[0].recv(data.data(), envelope(kAnySource, tag, 30000));
        must(source >= 1 && source <= 3, "a source must be a rank");
        int& number = next[static_cast<std::size_t>(source)];
        while (size(number) != tag) ++number;
        must(data == content(source, number++, 30000), "messages of a source keep their order");
      }
    }
  });
}

void many_outstanding() {
  World world(2);
  constexpr int kMessages = 1000;
  world.run([&](int r) {
    std::vector<Bytes> sent, received;
    std::vector<RequestPtr> requests;
    const auto size = [](int i) { return i % 10 == 0 ? 20000 : 256; };
    for (int i = 0; i < kMessages; ++i) {
      sent.push_back(content(r, i, size(i)));
      received.emplace_back(static_cast<std::size_t>(size(i)));
    }
    for (int i = 0; i < kMessages; ++i) requests.push_back(isend(world[r], sent[i], 1 - r, i));
    for (int i = kMessages - 1; i >= 0; --i) {
      requests.push_back(irecv(world[r], received[i], 1 - r, i));
    }
    for (const RequestPtr& request : requests) request->wait();
    for (int i = 0; i < kMessages; ++i) must(received[i] == content(1 - r, i, size(i)), "many");
  });
}

void to_itself() {
  World world(1);
  for (const std::int64_t bytes : kSizes) {
    send(world[0], content(0, 1, bytes), 0, 5);
    Bytes second(static_cast<std::size_t>(bytes));
    const RequestPtr later = irecv(world[0], second, 0, 6);
    must(recv(world[0], bytes, kAnySource, 5) == content(0, 1, bytes), "to itself");
    must(!later->completed(), "no message of tag 6 yet");
    send(world[0], content(0, 2, bytes), 0, 6);
    must(later->completed() && second == content(0, 2, bytes), "posted first");
  }
}

// The engine's thread completes what no thread waits for, and calls back once.
void completes_on_its_own() {
  World world(2);
  std::atomic<int> called = 0;
  const auto count = [](void* context) { ++*static_cast<std::atomic<int>*>(context); };
  world.run([&](int r) {
    Bytes data = r == 0 ? content(0, 1, 3 << 20) : Bytes(3 << 20);
    Options options;
    options.callback = {count, &called};
    const Envelope message = envelope(1 - r, 0, 3 << 20);
    const RequestPtr request = r == 0 ? world[0].isend(data.data(), message, options)
                                      : world[1].irecv(data.data(), message, options);
    while (!request->completed()) std::this_thread::yield();
    request->wait();
    must(r == 0 || data == content(0, 1, 3 << 20), "completed by the engine's thread");
  });
  while (called < 2) std::this_thread::yield();
}

// A tensor in a rank's heap, of which the other rank reads or writes directly.
struct InHeap {
  cpu::Group& group;
  std::byte* data;
  InHeap(cpu::Group& group, std::int64_t bytes)
      : group(group), data(group.heap()->allocate(bytes)) {}
  ~InHeap() { group.heap()->free(data); }
};

void tensors_in_the_window() {
  constexpr std::int64_t kBytes = (5 << 20) + 3;
  for (const bool source_in_window : {false, true}) {
    for (const bool target_in_window : {false, true}) {
      World world(2);
      world.run([&](int r) {
        InHeap mine(world[r], kBytes);
        Bytes plain(kBytes);
        std::byte* const data =
            (r == 0 ? source_in_window : target_in_window) ? mine.data : plain.data();
        const Bytes expected = content(0, 9, kBytes);
        if (r == 0) {
          std::memcpy(data, expected.data(), kBytes);
          world[0].send(data, envelope(1, 0, kBytes));
        } else {
          world[1].recv(data, envelope(0, 0, kBytes));
          must(std::memcmp(data, expected.data(), kBytes) == 0, "directly");
        }
      });
    }
  }
}

void close_completes_pending_operations() {
  World world(2);
  world.run([&](int r) {
    Bytes data = r == 0 ? content(0, 1, 2 << 20) : Bytes(2 << 20);
    const RequestPtr request = r == 0 ? isend(world[0], data, 1) : irecv(world[1], data, 0);
    world[r].close();
    must(request->completed(), "close() must complete what is pending");
    request->wait();
    must(data == content(0, 1, 2 << 20), "and well");
  });
}

void beside_collectives() {
  World world(2);
  world.run([&](int r) {
    std::thread other([&] {
      for (int i = 0; i < 100; ++i) {
        const std::int64_t bytes = i % 5 == 0 ? 50000 : 300;
        if ((r + i) % 2 == 0) {
          send(world[r], content(r, i, bytes), 1 - r, i);
        } else {
          must(recv(world[r], bytes, 1 - r, i) == content(1 - r, i, bytes), "beside collectives");
        }
      }
    });
    for (int i = 0; i < 100; ++i) {
      std::vector<float> x(1000, 1);
      world[r].run(
          {Collective::all_reduce, Algorithm::two_shot, DType::f32, ReduceOp::sum, 0, 1000},
          x.data(), x.data());
      must(x[999] == 2, "sums");
    }
    other.join();
  });
}

// Threads of a rank that wait for different messages.
void threads_share_an_engine() {
  World world(2);
  world.run([&](int r) {
    std::vector<std::thread> threads;
    std::atomic<bool> right = true;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < 25; ++i) {
          const std::int64_t bytes = i % 4 == 0 ? 60000 : 100;
          if ((r + t) % 2 == 0) {
            send(world[r], content(r, 100 * t + i, bytes), 1 - r, t);
          } else if (recv(world[r], bytes, 1 - r, t) != content(1 - r, 100 * t + i, bytes)) {
            right = false;
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    must(right, "threads share an engine");
  });
}

void refuses_bad_arguments() {
  World world(2);
  Bytes data(8);
  must(refused([&] { world[0].send(data.data(), envelope(2, 0, 8)); }), "rank 2 of 2");
  must(refused([&] { world[0].send(data.data(), envelope(kAnySource, 0, 8)); }), "any destination");
  must(refused([&] { world[0].recv(data.data(), envelope(-2, 0, 8)); }), "rank -2");
  must(refused([&] { world[0].recv(nullptr, envelope(1, 0, 8)); }), "no memory");
  must(refused([&] { world[0].recv(data.data(), envelope(1, 0, -1)); }), "negative size");
  World nodes(std::vector<int>{2, 1});
  must(refused([&] { nodes[0].send(data.data(), envelope(3, 0, 8)); }), "rank 3 of 3");
}

// The same order of the same calls on a rank as the reference matcher: per source and tag, in order.
void random_sequences() {
  for (unsigned seed = 0; seed < 8; ++seed) {
    Dice dice(seed);
    const int size = 2 + static_cast<int>(roll(dice, 3));
    struct Message {
      int from, to, tag;
      std::int64_t bytes;
      int number;
    };
    std::vector<Message> messages;
    for (int i = 0; i < 150; ++i) {
      const std::int64_t bytes = roll(dice, 3) == 0 ? roll(dice, 300000) : roll(dice, 2000);
      messages.push_back({static_cast<int>(roll(dice, size)), static_cast<int>(roll(dice, size)),
                          static_cast<int>(roll(dice, 4)), bytes, i});
    }
    World world = seed % 2 == 0 ? World(size) : World(std::vector<int>{size - 1, 1});
    world.run([&](int r) {
      Dice own(1000 * seed + static_cast<unsigned>(r));
      struct Step {
        bool receives;
        Message message;
      };
      // Sends keep their order per destination and tag, receives per source and tag; otherwise
      // both are interleaved at random.
      std::map<std::tuple<bool, int, int>, std::vector<Message>> queues;
      for (const Message& m : messages) {
        if (m.from == r) queues[{false, m.to, m.tag}].push_back(m);
        if (m.to == r) queues[{true, m.from, m.tag}].push_back(m);
      }
      std::vector<Step> steps;
      while (!queues.empty()) {
        auto queue = queues.begin();
        std::advance(queue, roll(own, static_cast<std::int64_t>(queues.size())));
        steps.push_back({std::get<0>(queue->first), queue->second.front()});
        queue->second.erase(queue->second.begin());
        if (queue->second.empty()) queues.erase(queue);
      }
      std::vector<Bytes> buffers(steps.size());
      std::vector<RequestPtr> requests;
      for (std::size_t i = 0; i < steps.size(); ++i) {
        const auto& [receives, m] = steps[i];
        buffers[i] = receives ? Bytes(static_cast<std::size_t>(m.bytes))
                              : content(m.from, m.number, m.bytes);
        requests.push_back(receives ? irecv(world[r], buffers[i], m.from, m.tag)
                                    : isend(world[r], buffers[i], m.to, m.tag));
        if (roll(own, 10) == 0)
          requests[static_cast<std::size_t>(roll(own, i + 1))]->wait(std::chrono::milliseconds(1));
      }
      for (const RequestPtr& request : requests) request->wait();
      for (std::size_t i = 0; i < steps.size(); ++i) {
        const auto& [receives, m] = steps[i];
        must(buffers[i] == content(m.from, m.number, m.bytes), "a message has another's bytes");
        must(!receives || requests[i]->source == m.from, "a receive knows its source");
      }
    });
  }
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm::test;
  return run_all({
      {"all_sizes", all_sizes},
      {"small_sends_cross", small_sends_cross},
      {"large_sends_cross", large_sends_cross},
      {"tags_out_of_order", tags_out_of_order},
      {"messages_of_a_tag_keep_their_order", messages_of_a_tag_keep_their_order},
      {"any_source", any_source},
      {"many_outstanding", many_outstanding},
      {"to_itself", to_itself},
      {"completes_on_its_own", completes_on_its_own},
      {"tensors_in_the_window", tensors_in_the_window},
      {"close_completes_pending_operations", close_completes_pending_operations},
      {"beside_collectives", beside_collectives},
      {"threads_share_an_engine", threads_share_an_engine},
      {"refuses_bad_arguments", refuses_bad_arguments},
      {"random_sequences", random_sequences},
  });
}
