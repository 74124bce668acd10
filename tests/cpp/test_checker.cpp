// The algorithms of core/ on the checker's executor (checker/comm.h): no run of the operations below has
// a race, a circle of waits or a wrong result, in whatever order the ranks get on.
#include <random>
#include <string>

#include "checker/world.h"
#include "run_all.h"

namespace pycomm::test {
namespace {

using namespace checker;

constexpr Where kPlaces[] = {Where::window, Where::own, Where::mixed};
// Small staging makes tiles and slots wrap many times; large staging holds several pieces of a chunk.
const Layout kSmall{16 << 10, 64, false};
const Layout kLarge{16 << 20, 64, false};
const Layout kLikeCuda{512 << 10, 2 << 10, true};

template <class T, std::size_t N>
T one_of(const T (&from)[N], std::mt19937& random) {
  return from[random() % N];
}

Step plain_step(int ranks, std::mt19937& random) {
  constexpr std::int64_t kCounts[] = {0, 1, 16, 33, 1000, 5003, 20011, 300007};
  constexpr Algorithm kAlgorithms[] = {Algorithm::one_shot, Algorithm::two_shot, Algorithm::ring,
                                       Algorithm::tree};
  constexpr DType kTypes[] = {DType::f64, DType::f32, DType::f16, DType::u8};
  Step step;
  Operation& operation = step.operation;
  operation.dtype = one_of(kTypes, random);
  operation.count = one_of(kCounts, random);
  operation.root = static_cast<int>(random() % static_cast<unsigned>(ranks));
  step.where = one_of(kPlaces, random);
  step.in_place = random() % 2 == 0;
  const unsigned which = random() % 8;
  operation.collective = which < 4 ? Collective::all_reduce : static_cast<Collective>(which - 3);
  operation.algorithm = which < 4 ? kAlgorithms[which] : Algorithm::two_shot;
  const bool blocks = operation.collective == Collective::reduce_scatter ||
                      operation.collective == Collective::all_gather;
  if (blocks) step.in_place = false;
  if (operation.collective == Collective::broadcast) step.in_place = true;
  if (operation.collective == Collective::barrier) operation.count = 0;
  return step;
}

// int8 with blocks of several sizes, or casts.
Step coded_step(std::mt19937& random) {
  constexpr std::int64_t kCounts[] = {1, 128, 5003, 16384, 70000, 300007};
  constexpr Algorithm kAlgorithms[] = {Algorithm::two_shot, Algorithm::ring, Algorithm::tree};
  constexpr std::uint32_t kBlocks[] = {128, 256, 4096};
  Step step;
  Operation& operation = step.operation;
  operation.collective = Collective::all_reduce;
  operation.algorithm = one_of(kAlgorithms, random);
  operation.dtype = random() % 2 == 0 ? DType::f32 : DType::bf16;
  operation.count = one_of(kCounts, random);
  operation.codec.kind = random() % 2 == 0 ? CodecKind::int8 : CodecKind::cast;
  operation.codec.values = DType::f16;
  operation.codec.block = one_of(kBlocks, random);
  operation.offset = static_cast<std::uint32_t>(random() % 8 * kLargestBlock / kSmallestBlock);
  step.where = one_of(kPlaces, random);
  step.in_place = random() % 2 == 0;
  return step;
}

Step topk_step(std::mt19937& random) {
  constexpr std::int64_t kCounts[] = {0, 1, 65536, 65537, 300007, 1500001};
  constexpr DType kValues[] = {DType::f32, DType::bf16, DType::u8};
  Step step;
  Operation& operation = step.operation;
  operation.collective = Collective::all_reduce;
  operation.algorithm = Algorithm::two_shot;
  operation.dtype = random() % 2 == 0 ? DType::f32 : DType::bf16;
  operation.count = one_of(kCounts, random);
  operation.codec.kind = CodecKind::topk;
  operation.codec.values = one_of(kValues, random);
  operation.codec.k = static_cast<std::uint32_t>(operation.count / 50 + 1);
  operation.offset = static_cast<std::uint32_t>(random() % 8 * 65536 / kSmallestBlock);
  step.where = one_of(kPlaces, random);
  return step;
}

Step striped_step(std::mt19937& random) {
  Step step;
  step.operation.collective = Collective::all_reduce;
  step.operation.algorithm = Algorithm::two_shot;
  step.operation.dtype = DType::f32;
  step.operation.count = static_cast<std::int64_t>(random() % 900000);
  step.operation.offset = static_cast<std::uint32_t>(random() % 1000);
  step.where = one_of(kPlaces, random);
  step.stripes = true;
  return step;
}

void plain(int ranks, const Layout& layout, unsigned order = 0) {
  std::mt19937 random(static_cast<unsigned>(ranks));
  std::vector<Step> steps;
  for (int i = 0; i < 60; ++i) steps.push_back(plain_step(ranks, random));
  World(ranks, layout, order).run(steps);
}

// Compressed operations among others.
void mixed(int ranks, const Layout& layout) {
  std::mt19937 random(static_cast<unsigned>(ranks));
  std::vector<Step> steps;
  for (int i = 0; i < 12; ++i) {
    steps.push_back(coded_step(random));
    steps.push_back(plain_step(ranks, random));
    steps.push_back(topk_step(random));
    steps.push_back(coded_step(random));
    steps.push_back(striped_step(random));
    steps.push_back(topk_step(random));
  }
  World(ranks, layout).run(steps);
}

void between_nodes(const std::vector<int>& nodes) {
  std::mt19937 random(static_cast<unsigned>(nodes.size()));
  std::vector<Step> steps;
  for (int i = 0; i < 4; ++i) {
    steps.push_back(striped_step(random));
    steps.back().in_place = random() % 2 == 0;
  }
  World(nodes, kSmall).run(steps);
}

// Operations on each other's tensors, one after the other.
std::vector<Step> direct_steps(int ranks) {
  std::vector<Step> steps;
  for (const Algorithm algorithm : {Algorithm::two_shot, Algorithm::ring, Algorithm::tree}) {
    steps.push_back({{Collective::all_reduce, algorithm, DType::f32, ReduceOp::sum, 0, 1000}});
  }
  for (const Collective collective :
       {Collective::reduce_scatter, Collective::all_gather, Collective::broadcast}) {
    steps.push_back({{collective, Algorithm::two_shot, DType::f32, ReduceOp::sum, ranks - 1, 100}});
    steps.back().in_place = collective == Collective::broadcast;
  }
  for (Step& step : steps) step.where = Where::window;
  return steps;
}

// Every rank raises or dies in every wait, under several orders of events. Calls use(fault, seed).
template <class Use>
void each_fault(int ranks, const std::vector<Step>& steps, Use use) {
  World whole(ranks, kSmall);
  whole.run(steps);
  for (Fault fault{0}; fault.rank < ranks; ++fault.rank) {
    for (fault.step = 0; fault.step < steps.size(); ++fault.step) {
      for (fault.wait = 0; fault.wait < whole.waits(fault.rank, fault.step); ++fault.wait) {
        for (unsigned seed = 1; seed <= 6; ++seed) {
          fault.dies = seed % 3 == 0;
          use(fault, seed);
        }
      }
    }
  }
}

// Nobody uses a tensor that its rank has got back, and who succeeds has the right result.
void failures(int ranks) {
  const std::vector<Step> steps = direct_steps(ranks);
  each_fault(ranks, steps, [&](const Fault& fault, unsigned seed) {
    World(ranks, kSmall, seed).run(steps, fault);
  });
}

// Without the acknowledgement they do.
void failures_without_retreat(int ranks) {
  const std::vector<Step> steps = direct_steps(ranks);
  int found = 0;
  each_fault(ranks, steps, [&](Fault fault, unsigned seed) {
    fault.retreats = false;
    try {
      World(ranks, kSmall, seed).run(steps, fault);
    } catch (const Violation&) {
      ++found;
    }
  });
  PYCOMM_CHECK(found > 0, "tensors that are used after an error must be found");
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm::test;
  std::vector<std::pair<const char*, std::function<void()>>> tests;
  for (const std::vector<int>& nodes :
       std::vector<std::vector<int>>{{1, 1}, {2, 2}, {3, 2}, {1, 3, 2}, {2, 2, 2}, {1, 1, 1, 1}}) {
    tests.push_back({"between nodes", [=] { between_nodes(nodes); }});
  }
  for (int n = 2; n <= 9; ++n) {
    tests.push_back({"plain operations", [=] { plain(n, kSmall); }});
    tests.push_back({"with large staging", [=] { plain(n, kLarge); }});
    tests.push_back({"packets in staging", [=] { plain(n, kLikeCuda); }});
    tests.push_back({"mixed with compressed ones", [=] { mixed(n, kLikeCuda); }});
    tests.push_back({"mixed, with large staging", [=] { mixed(n, kLarge); }});
  }
  tests.push_back({"ranks in another order", [] { plain(4, kSmall, 1); }});
  for (int n = 2; n <= 4; ++n) {
    tests.push_back({"a failure in every wait", [=] { failures(n); }});
    tests.push_back({"without retreat", [=] { failures_without_retreat(n); }});
  }
  for (const auto& test : tests) {
    if (run_all({test}) != 0) return 1;  // a mutant needs no more
  }
  return 0;
}
