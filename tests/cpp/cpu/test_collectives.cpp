// Every collective and algorithm with ranks as threads, against plain integer arithmetic, under
// random delays. Small staging areas make tiles, slots and pieces wrap around many times.
#include <algorithm>
#include <atomic>
#include <vector>

#include "support/dice.h"
#include "support/world.h"

namespace pycomm::test {
namespace {

constexpr Algorithm kAlgorithms[] = {Algorithm::one_shot, Algorithm::two_shot, Algorithm::ring,
                                     Algorithm::tree};

// Small integers, so that every order of addition is exact.
float value(int rank, std::int64_t i, int round) {
  return static_cast<float>((i * 7 + rank * 31 + round * 13) % 101 - 50);
}

float sum_of(int n, std::int64_t i, int round) {
  float sum = 0;
  for (int r = 0; r < n; ++r) sum += value(r, i, round);
  return sum;
}

void dawdle(Dice& random) {
  for (unsigned i = random() % 4; i > 0; --i) std::this_thread::yield();
}

// A rank's tensor, in its window or in ordinary memory.
class Tensor {
 public:
  Tensor(cpu::Group& group, std::int64_t count, bool in_window) : heap_(group.heap()) {
    if (in_window) {
      shared_ = heap_->allocate(count * 4);
    } else {
      own_.resize(static_cast<std::size_t>(count) + 1);  // misaligned by an element
    }
  }
  ~Tensor() {
    if (shared_ != nullptr) heap_->free(shared_);
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  float* data() { return shared_ != nullptr ? reinterpret_cast<float*>(shared_) : own_.data() + 1; }

 private:
  std::shared_ptr<cpu::Heap> heap_;
  std::vector<float> own_;
  std::byte* shared_ = nullptr;
};

void check_value(float got, float want, std::int64_t i) {
  PYCOMM_CHECK(got == want, "element " + std::to_string(i) + " is " + std::to_string(got) +
                                ", expected " + std::to_string(want));
}

void all_reduces(int n, std::uint32_t first_epoch) {
  World world(n, 16 << 10, first_epoch);
  world.run([&](int r) {
    Dice random(static_cast<unsigned>(n * 100 + r));
    int round = 0;
    for (const std::int64_t count : {1, 17, 1000, 20011}) {
      // All in ordinary memory, all in windows, mixed.
      for (int pass = 0; pass < 15; ++pass) {
        const int where = pass % 3;
        Tensor tensor(world[r], count, where == 1 || (where == 2 && r == 0));
        for (const Algorithm algorithm : kAlgorithms) {
          ++round;
          float* x = tensor.data();
          for (std::int64_t i = 0; i < count; ++i) x[i] = value(r, i, round);
          dawdle(random);
          world[r].run({Collective::all_reduce, algorithm, DType::f32, ReduceOp::sum, 0, count}, x,
                       x);
          for (std::int64_t i = 0; i < count; ++i) check_value(x[i], sum_of(n, i, round), i);
        }
      }
    }
  });
}

void blocks(int n) {
  World world(n, 16 << 10);
  world.run([&](int r) {
    Dice random(static_cast<unsigned>(r));
    for (const std::int64_t count : {1, 33, 5003}) {
      for (const bool in_window : {false, true}) {
        Tensor whole(world[r], count * n, in_window), block(world[r], count, in_window);
        float *w = whole.data(), *b = block.data();
        for (std::int64_t i = 0; i < count * n; ++i) w[i] = value(r, i, 1);
        dawdle(random);
        world[r].run(
            {Collective::reduce_scatter, Algorithm::two_shot, DType::f32, ReduceOp::sum, 0, count},
            w, b);
        for (std::int64_t i = 0; i < count; ++i) check_value(b[i], sum_of(n, r * count + i, 1), i);

        dawdle(random);
        world[r].run(
            {Collective::all_gather, Algorithm::two_shot, DType::f32, ReduceOp::sum, 0, count}, b,
            w);
        for (std::int64_t i = 0; i < count * n; ++i) check_value(w[i], sum_of(n, i, 1), i);
      }
    }
  });
}

void broadcasts(int n) {
  World world(n, 16 << 10);
  world.run([&](int r) {
    Dice random(static_cast<unsigned>(r));
    for (const bool in_window : {false, true}) {
      for (int root = 0; root < n; ++root) {
        const std::int64_t count = 9001;
        Tensor tensor(world[r], count, in_window);
        float* x = tensor.data();
        for (std::int64_t i = 0; i < count; ++i) x[i] = value(r, i, root);
        dawdle(random);
        world[r].run(
            {Collective::broadcast, Algorithm::one_shot, DType::f32, ReduceOp::sum, root, count}, x,
            x);
        for (std::int64_t i = 0; i < count; ++i) check_value(x[i], value(root, i, root), i);
      }
    }
  });
}

// From and to a root: reduce, gather and scatter.
void rooted(int n) {
  World world(n, 16 << 10);
  world.run([&](int r) {
    Dice random(static_cast<unsigned>(r));
    for (const std::int64_t count : {0, 1, 33, 9001}) {
      for (const bool in_window : {false, true}) {
        Tensor whole(world[r], count * n, in_window), block(world[r], count, in_window);
        float *w = whole.data(), *b = block.data();
        for (int root = 0; root < n; ++root) {
          const auto run = [&](Collective collective, const float* from, float* to) {
            dawdle(random);
            world[r].run({collective, Algorithm::two_shot, DType::f32, ReduceOp::sum, root, count},
                         from, to);
          };
          for (std::int64_t i = 0; i < count; ++i) b[i] = value(r, i, root);
          run(Collective::reduce, b, b);
          for (std::int64_t i = 0; i < count; ++i) {
            check_value(b[i], r == root ? sum_of(n, i, root) : value(r, i, root), i);
          }
          for (std::int64_t i = 0; i < count; ++i) b[i] = value(r, i, root);
          for (std::int64_t i = 0; i < count * n; ++i) w[i] = -1;
          run(Collective::gather, b, r == root ? w : nullptr);
          for (std::int64_t i = 0; i < count * n; ++i) {
            const int from = static_cast<int>(i / count);
            check_value(w[i], r == root ? value(from, i % count, root) : -1, i);
          }
          run(Collective::scatter, r == root ? w : nullptr, b);
          for (std::int64_t i = 0; i < count; ++i) check_value(b[i], value(r, i, root), i);
        }
      }
    }
  });
}

void all_to_alls(int n) {
  World world(n, 16 << 10);
  world.run([&](int r) {
    Dice random(static_cast<unsigned>(r));
    for (const std::int64_t count : {0, 1, 33, 9001}) {
      for (const bool in_window : {false, true}) {
        Tensor from(world[r], count * n, in_window), to(world[r], count * n, in_window);
        float *x = from.data(), *y = to.data();
        for (std::int64_t i = 0; i < count * n; ++i) x[i] = value(r, i, 2);
        dawdle(random);
        world[r].run(
            {Collective::all_to_all, Algorithm::two_shot, DType::f32, ReduceOp::sum, 0, count}, x,
            y);
        for (std::int64_t i = 0; i < count * n; ++i) {
          const int sender = static_cast<int>(i / count);
          check_value(y[i], value(sender, r * count + i % count, 2), i);
        }
      }
    }
  });
}

// How many elements rank `from` has for rank `to`; some ranks have none.
std::int64_t uneven_count(int from, int to, std::int64_t unit) {
  return (from * 7 + to * 3) % 5 * unit;
}

// Blocks of different sizes, each in memory of its own.
struct OwnBlocks {
  explicit OwnBlocks(std::vector<std::int64_t> sizes) : counts(std::move(sizes)) {
    for (const std::int64_t count : counts) {
      memory.emplace_back(static_cast<std::size_t>(count), -1.0f);
      addresses.push_back(memory.back().data());
    }
  }
  Blocks blocks() const { return {addresses.data(), counts.data()}; }

  std::vector<std::int64_t> counts;
  std::vector<std::vector<float>> memory;
  std::vector<const void*> addresses;
};

Call in_blocks(Collective collective) {
  return {{collective, Algorithm::two_shot, DType::f32, ReduceOp::sum, 0, 0}};
}

void uneven_blocks(int n) {
  World world(n, 16 << 10);
  world.run([&](int r) {
    Dice random(static_cast<unsigned>(r));
    for (const std::int64_t unit : {0, 1, 33, 3001}) {
      std::vector<std::int64_t> sizes, sent, expected;
      for (int i = 0; i < n; ++i) {
        sizes.push_back(uneven_count(i, 0, unit));
        sent.push_back(uneven_count(r, i, unit));
        expected.push_back(uneven_count(i, r, unit));
      }
      OwnBlocks all(sizes), in(sent), out(expected);
      std::vector<float> mine(static_cast<std::size_t>(sizes[static_cast<std::size_t>(r)]));
      const auto each = [](OwnBlocks& blocks, auto visit) {
        for (std::size_t b = 0; b < blocks.memory.size(); ++b) {
          for (std::size_t i = 0; i < blocks.memory[b].size(); ++i) {
            visit(blocks.memory[b][i], static_cast<int>(b), static_cast<std::int64_t>(i));
          }
        }
      };
      for (std::size_t i = 0; i < mine.size(); ++i) {
        mine[i] = value(r, static_cast<std::int64_t>(i), 3);
      }
      dawdle(random);
      Call gather = in_blocks(Collective::all_gather);
      gather.input = mine.data();
      gather.outputs = all.blocks();
      world[r].run(gather);
      each(all, [](float x, int b, std::int64_t i) { check_value(x, value(b, i, 3), i); });

      each(all, [&](float& x, int b, std::int64_t i) { x = value(r, b * 9 + i, 4); });
      dawdle(random);
      Call scatter = in_blocks(Collective::reduce_scatter);
      scatter.inputs = all.blocks();
      scatter.output = mine.data();
      world[r].run(scatter);
      for (std::size_t i = 0; i < mine.size(); ++i) {
        const auto at = static_cast<std::int64_t>(i);
        check_value(mine[i], sum_of(n, r * 9 + at, 4), at);
      }

      each(in, [&](float& x, int b, std::int64_t i) { x = value(r, b * 9 + i, 5); });
      dawdle(random);
      Call exchange = in_blocks(Collective::all_to_all);
      exchange.inputs = in.blocks();
      exchange.outputs = out.blocks();
      world[r].run(exchange);
      each(out, [&](float x, int b, std::int64_t i) { check_value(x, value(b, r * 9 + i, 5), i); });
    }
  });
}

void works_in_order() {
  const int n = 3;
  World world(n);
  world.run([&](int r) {
    constexpr int kWorks = 40;
    constexpr std::int64_t kCount = 300;
    std::vector<std::vector<float>> buffers;
    std::vector<std::shared_ptr<cpu::Work>> works;
    for (int k = 0; k < kWorks; ++k) {
      buffers.emplace_back(kCount, static_cast<float>(k));
    }
    for (int k = 0; k < kWorks; ++k) {
      const Operation operation{
          Collective::all_reduce, kAlgorithms[k % 4], DType::f32, ReduceOp::sum, 0, kCount};
      float* x = buffers[static_cast<std::size_t>(k)].data();
      if (k % 5 == 4) {
        world[r].run(operation, x, x);  // runs after those in the queue
      } else {
        works.push_back(world[r].submit(operation, x, x));
      }
    }
    for (const auto& work : works) {
      PYCOMM_CHECK(work->wait(std::chrono::seconds(60)), "a work must complete");
    }
    for (int k = 0; k < kWorks; ++k) {
      for (const float x : buffers[static_cast<std::size_t>(k)]) {
        check_value(x, static_cast<float>(n * k), k);
      }
    }
  });
}

void two_groups() {
  World a(3), b(3);
  a.run([&](int r) {
    // Different groups on different threads of one rank, in opposite order.
    const auto use = [&](World& world) {
      for (int k = 0; k < 50; ++k) {
        std::vector<float> x(500, static_cast<float>(r));
        world[r].run(
            {Collective::all_reduce, kAlgorithms[k % 4], DType::f32, ReduceOp::sum, 0, 500},
            x.data(), x.data());
        for (const float got : x) check_value(got, 3, k);
      }
    };
    std::thread other([&] { use(b); });
    use(a);
    other.join();
  });
}

// A rank that fails ends the waits of the others; the world cannot be without ranks.
void local_worlds_fail() {
  cpu::LocalWorld world({2, 1}, {.timeout = 20});
  std::atomic<int> died{0};
  const auto fail = [&](int r) {
    if (r == 1) throw std::runtime_error("rank 1's own");
    try {
      world[r].run({Collective::barrier, Algorithm::one_shot, DType::u8, ReduceOp::sum, 0, 0},
                   nullptr, nullptr);
    } catch (const CollectiveError& error) {
      died += error.reason == Reason::peer_died && r == 0 ? 1 : 0;
    }
  };
  std::string first;
  try {
    world.run(fail);
  } catch (const std::exception& error) {
    first = error.what();
  }
  PYCOMM_CHECK(first == "rank 1's own", "run() throws the rank's error, got " + first);
  PYCOMM_CHECK(died == 1, "the other rank of the node learns that it has died");
  PYCOMM_CHECK(refused([] { cpu::LocalWorld(0); }), "no ranks");
  PYCOMM_CHECK(refused([] { cpu::LocalWorld({2, 0}); }), "no ranks on a node");
  PYCOMM_CHECK(refused([] { cpu::LocalWorld(1, {.timeout = -1}); }), "no timeout");
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm::test;
  std::vector<std::pair<const char*, std::function<void()>>> tests;
  for (int n = 2; n <= 5; ++n) {
    tests.push_back({"all-reduce", [n] { all_reduces(n, 0); }});
    tests.push_back({"reduce-scatter and all-gather", [n] { blocks(n); }});
    tests.push_back({"broadcast", [n] { broadcasts(n); }});
    tests.push_back({"reduce, gather and scatter", [n] { rooted(n); }});
    tests.push_back({"all-to-all", [n] { all_to_alls(n); }});
    tests.push_back({"uneven blocks", [n] { uneven_blocks(n); }});
  }
  tests.push_back({"all-reduce, 9 ranks", [] { all_reduces(9, 0); }});
  tests.push_back({"all-reduce across the wrap of epochs", [] { all_reduces(3, 0xffffffe0u); }});
  tests.push_back({"works run in order", works_in_order});
  tests.push_back({"two groups at once", two_groups});
  tests.push_back({"worlds that fail", local_worlds_fail});
  return run_all(tests);
}
