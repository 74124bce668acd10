// Groups that span simulated nodes: ranks are threads, so that sanitizers see every node. Python
// tests check the numbers.
#include <cmath>
#include <vector>

#include "support/messages.h"
#include "support/world.h"

namespace pycomm::test {
namespace {

const std::vector<std::vector<int>> kLayouts = {{1, 1}, {2, 2}, {3, 1}, {1, 2, 1}};

// Small integers, so that every order of addition is exact.
float value(int rank, std::int64_t i) { return static_cast<float>((i * 7 + rank * 31) % 101 - 50); }

float sum_of(int n, std::int64_t i) {
  float sum = 0;
  for (int r = 0; r < n; ++r) sum += value(r, i);
  return sum;
}

void fill(std::vector<float>& x, int rank) {
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = value(rank, static_cast<std::int64_t>(i));
}

void check_value(float got, float want, std::int64_t i) {
  PYCOMM_CHECK(got == want, "element " + std::to_string(i) + " is " + std::to_string(got) +
                                ", expected " + std::to_string(want));
}

Operation operation_on(Collective collective, std::int64_t count) {
  Operation operation;
  operation.collective = collective;
  operation.algorithm = Algorithm::automatic;
  operation.dtype = DType::f32;
  operation.count = count;
  return operation;
}

// Inline and on the workers, one after another.
void sums(const std::vector<int>& ranks_per_node, Algorithm algorithm) {
  World world(ranks_per_node);
  world.run([&](int rank) {
    for (const std::int64_t count : {0, 5, 3000, 400001}) {
      Operation operation = operation_on(Collective::all_reduce, count);
      operation.algorithm = algorithm;
      std::vector<float> x(static_cast<std::size_t>(count)), y(x.size());
      fill(x, rank);
      fill(y, rank);
      const auto work = world[rank].submit(operation, y.data(), y.data());
      world[rank].run(operation, x.data(), x.data());
      while (!work->wait(std::chrono::seconds(1))) continue;
      for (std::int64_t i = 0; i < count; ++i) {
        check_value(x[static_cast<std::size_t>(i)], sum_of(world.size(), i), i);
        check_value(y[static_cast<std::size_t>(i)], sum_of(world.size(), i), i);
      }
    }
  });
}

// Among many nodes, small stripes travel in rounds.
void sums_among_many() {
  for (const int nodes : {9, 16, 17}) {
    std::vector<int> ranks_per_node(static_cast<std::size_t>(nodes), 1);
    sums(ranks_per_node, Algorithm::automatic);
    ranks_per_node[1] = 2;
    sums(ranks_per_node, Algorithm::automatic);
  }
}

void halves(const std::vector<int>& ranks_per_node) {
  World world(ranks_per_node);
  const std::int64_t block = 70001;
  const auto all = static_cast<std::size_t>(block * world.size());
  world.run([&](int rank) {
    std::vector<float> x(all), y(static_cast<std::size_t>(block)), z(all);
    fill(x, rank);
    world[rank].run(operation_on(Collective::reduce_scatter, block), x.data(), y.data());
    world[rank].run(operation_on(Collective::all_gather, block), y.data(), z.data());
    for (std::size_t i = 0; i < all; ++i) {
      const auto at = static_cast<std::int64_t>(i);
      check_value(z[i], sum_of(world.size(), at), at);
    }
  });
}

// With feedback, nothing is lost in sums over all ranks.
void compressed(const std::vector<int>& ranks_per_node, CodecKind kind,
                Algorithm algorithm = Algorithm::automatic) {
  World world(ranks_per_node);
  const std::int64_t count = 300001;
  const auto n = static_cast<std::size_t>(count);
  std::vector<std::vector<float>> results(static_cast<std::size_t>(world.size())), kept = results;
  world.run([&](int rank) {
    Operation operation = operation_on(Collective::all_reduce, count);
    operation.algorithm = algorithm;
    operation.codec.kind = kind;
    operation.codec.values = DType::f32;
    if (kind == CodecKind::int8) operation.codec.block = 256;
    operation.codec.k = 3000;
    operation.codec.feedback = 1;
    std::vector<float>& x = results[static_cast<std::size_t>(rank)];
    std::vector<float>& residual = kept[static_cast<std::size_t>(rank)];
    x.resize(n);
    residual.resize(n);
    fill(x, rank);
    Feedback feedback;
    feedback.residual = residual.data();
    world[rank].run(operation, x.data(), x.data(), nullptr, feedback);
  });
  for (std::size_t i = 0; i < n; ++i) {
    float sum = results[0][i];
    for (const auto& residual : kept) sum += residual[i];
    const float want = sum_of(world.size(), static_cast<std::int64_t>(i));
    PYCOMM_CHECK(std::abs(sum - want) < 1e-2f, "element " + std::to_string(i) + " is lost");
    for (const auto& other : results) PYCOMM_CHECK(other[i] == results[0][i], "results differ");
  }
}

// Likewise, while all-reduces are under way on the workers.
void scattered(const std::vector<int>& ranks_per_node, bool feeds) {
  World world(ranks_per_node);
  const std::int64_t block = 70001, all = block * world.size();
  std::vector<std::vector<float>> results(static_cast<std::size_t>(world.size())), kept = results;
  world.run([&](int rank) {
    Operation operation = operation_on(Collective::reduce_scatter, block);
    operation.codec.kind = feeds ? CodecKind::int8 : CodecKind::cast;
    operation.codec.block = feeds ? 256 : 0;
    operation.codec.feedback = feeds ? 1 : 0;
    std::vector<float> x(static_cast<std::size_t>(all)), other(5000);
    std::vector<float>& result = results[static_cast<std::size_t>(rank)];
    std::vector<float>& residual = kept[static_cast<std::size_t>(rank)];
    result.resize(static_cast<std::size_t>(block));
    residual.resize(x.size());
    fill(x, rank);
    Feedback feedback;
    if (feeds) feedback.residual = residual.data();
    const auto work =
        world[rank].submit(operation_on(Collective::all_reduce, 5000), other.data(), other.data());
    PYCOMM_CHECK(!world[rank].run(operation, x.data(), result.data(), nullptr, feedback),
                 "all is finite");
    while (!work->wait(std::chrono::seconds(1))) continue;
  });
  for (std::int64_t i = 0; i < all; ++i) {
    const auto owner = static_cast<std::size_t>(i / block),
               at = static_cast<std::size_t>(i % block);
    float sum = results[owner][at];
    for (const auto& residual : kept) sum += residual[static_cast<std::size_t>(i)];
    PYCOMM_CHECK(std::abs(sum - sum_of(world.size(), i)) < 1e-2f,
                 "element " + std::to_string(i) + " is lost");
  }
}

// The sums of 16-bit gradients that are zero at first are not taken for unused.
void partly_zero(const std::vector<int>& ranks_per_node) {
  World world(ranks_per_node);
  world.run([&](int rank) {
    Operation operation = operation_on(Collective::all_reduce, 200000);
    operation.dtype = DType::bf16;
    operation.codec.kind = CodecKind::int8;
    operation.codec.block = 256;
    operation.codec.feedback = 1;
    std::vector<std::uint16_t> x(200000);
    std::fill(x.begin() + 150000, x.end(), std::uint16_t{0x3f80});  // 1.0
    std::vector<float> residual(x.size(), 1.0f);
    Feedback feedback;
    feedback.residual = residual.data();
    feedback.hold_unused = true;
    world[rank].run(operation, x.data(), x.data(), nullptr, feedback);
    PYCOMM_CHECK(x.front() != 0, "a residual waits although the gradient is used");
  });
}

// One rank aborts the group in the middle of operations.
void aborts(const std::vector<int>& ranks_per_node) {
  for (int victim = 0; victim < 3; ++victim) {
    World world(ranks_per_node);
    int stopped = 0;
    std::mutex mutex;
    world.run([&](int rank) {
      std::vector<float> x(200000);
      const Operation operation =
          operation_on(Collective::all_reduce, static_cast<std::int64_t>(x.size()));
      try {
        for (int turn = 0;; ++turn) {
          if (rank == victim % world.size() && turn == 5) world[rank].abort();
          world[rank].run(operation, x.data(), x.data());
        }
      } catch (const CollectiveError& error) {
        PYCOMM_CHECK(error.reason == Reason::aborted, "the reason is another one");
        const std::lock_guard lock(mutex);
        ++stopped;
      }
    });
    PYCOMM_CHECK(stopped == world.size(), "a rank has not stopped");
  }
}

// Only a node that has broken a batch and said nothing has died.
void deaths() {
  const auto ends = cpu::LocalTransport::make(2);
  cpu::Transport &silent = *ends[0], &told = *ends[1];
  silent.lose(1);
  silent.finished(1);
  must(!silent.died(1), "its last bytes may be on their way");
  silent.fail(1);
  must(silent.died(1), "a node that has broken a batch is dead");
  told.fail(0);
  must(!told.died(0), "its farewell may be on its way");
  told.heard(0, {});
  must(!told.died(0), "it has said why it stopped");
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm;
  using namespace pycomm::test;
  const auto everywhere = [](auto body) {
    return [body] {
      for (const auto& ranks_per_node : kLayouts) body(ranks_per_node);
    };
  };
  return run_all({
      {"sums", everywhere([](const auto& nodes) { sums(nodes, Algorithm::automatic); })},
      {"sums among many nodes", sums_among_many},
      {"sums by ring", everywhere([](const auto& nodes) { sums(nodes, Algorithm::ring); })},
      {"sums by tree", everywhere([](const auto& nodes) { sums(nodes, Algorithm::tree); })},
      {"reduce-scatter and all-gather", everywhere(halves)},
      {"int8",
       everywhere([](const auto& ranks_per_node) { compressed(ranks_per_node, CodecKind::int8); })},
      {"int8 by ring",
       everywhere([](const auto& nodes) { compressed(nodes, CodecKind::int8, Algorithm::ring); })},
      {"int8 by tree",
       everywhere([](const auto& nodes) { compressed(nodes, CodecKind::int8, Algorithm::tree); })},
      {"top-k",
       everywhere([](const auto& ranks_per_node) { compressed(ranks_per_node, CodecKind::topk); })},
      {"reduce-scatter of int8",
       everywhere([](const auto& ranks_per_node) { scattered(ranks_per_node, true); })},
      {"reduce-scatter of casts",
       everywhere([](const auto& ranks_per_node) { scattered(ranks_per_node, false); })},
      {"tensors that are partly zero", everywhere(partly_zero)},
      {"abort", everywhere(aborts)},
      {"deaths", deaths},
  });
}
