// Runs the algorithms of core/ on the checker's executor (checker/comm.h). Whatever the order in
// which ranks advance, no run has a race, a deadlock or a wrong result.
#include <string>

#include "checker/world.h"
#include "support/dice.h"
#include "support/run_all.h"

namespace pycomm::test {
namespace {

using namespace checker;

constexpr Where kPlaces[] = {Where::window, Where::own, Where::mixed};
// With little staging, tiles and slots wrap around many times; with much, it holds several pieces
// of a chunk. Epochs that wrap around do so within the first operations.
constexpr std::uint32_t kLastEpochs = 0xfffffffc;
const Layout kSmall{16 << 10, 64, 0};
const Layout kSmallAndLate{16 << 10, 64, kLastEpochs};
const Layout kLarge{16 << 20, 64, 0};
// Small enough for tiles to wrap around, large enough for a piece of every stripe.
const Layout kCoded{256 << 10, 64, kLastEpochs};
const Layout kLargePackets{512 << 10, 2 << 10, kLastEpochs};

template <class T, std::size_t N>
T one_of(const T (&from)[N], Dice& random) {
  return from[random() % N];
}

Step plain_step(int ranks, Dice& random) {
  constexpr std::int64_t kCounts[] = {0, 1, 16, 33, 1000, 5003, 20011, 300007};
  constexpr Algorithm kAlgorithms[] = {Algorithm::one_shot, Algorithm::two_shot, Algorithm::ring,
                                       Algorithm::tree, Algorithm::multicast};
  constexpr DType kTypes[] = {DType::f64, DType::f32, DType::f16, DType::u8};
  Step step;
  Operation& operation = step.operation;
  operation.dtype = one_of(kTypes, random);
  operation.count = one_of(kCounts, random);
  operation.root = static_cast<int>(random() % static_cast<unsigned>(ranks));
  step.where = one_of(kPlaces, random);
  step.in_place = random() % 2 == 0;
  const unsigned which = random() % 13;
  operation.collective = which < 5 ? Collective::all_reduce : static_cast<Collective>(which - 4);
  operation.algorithm = which < 5 ? kAlgorithms[which] : Algorithm::two_shot;
  const bool whole =
      operation.collective == Collective::all_reduce || operation.collective == Collective::reduce;
  if (!whole) step.in_place = operation.collective == Collective::broadcast;
  if (operation.collective == Collective::barrier) operation.count = 0;
  return step;
}

// int8 with several block sizes, or casts.
Step coded_step(Dice& random) {
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
  if (operation.codec.kind == CodecKind::int8) operation.codec.block = one_of(kBlocks, random);
  operation.offset = static_cast<std::uint32_t>(random() % 8 * kLargestBlock / kSmallestBlock);
  step.where = one_of(kPlaces, random);
  step.in_place = random() % 2 == 0;
  return step;
}

// A ring or a tree between nodes, of up to some tiles.
Step relayed_step(Dice& random) {
  constexpr std::int64_t kCounts[] = {0, 1, 17, 30011, 300007, 3000017};
  Step step;
  Operation& operation = step.operation;
  operation.collective = Collective::all_reduce;
  operation.algorithm = random() % 2 == 0 ? Algorithm::ring : Algorithm::tree;
  operation.dtype = random() % 2 == 0 ? DType::f32 : DType::bf16;
  operation.count = one_of(kCounts, random);
  step.where = one_of(kPlaces, random);
  step.in_place = random() % 2 == 0;
  return step;
}

// Every rank gets whole blocks of the codec.
Step coded_scatter_step(Dice& random) {
  constexpr std::int64_t kBlocksPerRank[] = {0, 1, 3, 20, 41};
  Step step = coded_step(random);
  step.operation.collective = Collective::reduce_scatter;
  step.operation.algorithm = Algorithm::two_shot;
  step.operation.count = one_of(kBlocksPerRank, random) * kLargestBlock;
  step.in_place = false;
  step.feedback = random() % 2 == 0;
  return step;
}

Step topk_step(Dice& random) {
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

Step striped_step(Dice& random) {
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

// With exchanges of sums for a norm, for LAMB's ratios, for both or for neither.
Step sharded_step(std::int64_t count, unsigned exchanges) {
  Step step{{Collective::sharded_step, Algorithm::two_shot, DType::f32, ReduceOp::sum, 0, count}};
  step.where = Where::window;
  step.in_place = false;
  step.measures = (exchanges & 1) != 0;
  step.adapts = (exchanges & 2) != 0;
  return step;
}

void sharded(int ranks, const Layout& layout, unsigned order) {
  Dice random(static_cast<unsigned>(ranks));
  std::vector<Step> steps;
  for (int i = 0; i < 30; ++i) {
    steps.push_back(sharded_step(i % 5 == 0 ? ranks - 1 : 5003, random() % 4));
    if (i % 3 == 0) steps.push_back(plain_step(ranks, random));
  }
  World(ranks, layout, order).run(steps);
}

void plain(int ranks, const Layout& layout, unsigned order = 0) {
  Dice random(static_cast<unsigned>(ranks));
  std::vector<Step> steps;
  for (int i = 0; i < 60; ++i) steps.push_back(plain_step(ranks, random));
  World(ranks, layout, order).run(steps);
}

// Packets with each of the last and first sequence numbers, in fresh memory.
void packets_across_the_wrap() {
  for (std::uint32_t first = 0xfffffffb; first != 2; ++first) {
    Layout layout = kSmall;
    layout.first_epoch = first;
    const Step step{{Collective::all_reduce, Algorithm::one_shot, DType::f32, ReduceOp::sum, 0, 4}};
    for (unsigned order = 1; order <= 8; ++order) World(2, layout, order).run({step, step, step});
  }
}

// Compressed operations mixed with others.
void mixed(int ranks, const Layout& layout) {
  Dice random(static_cast<unsigned>(ranks));
  std::vector<Step> steps;
  for (int i = 0; i < 12; ++i) {
    steps.push_back(coded_step(random));
    steps.push_back(plain_step(ranks, random));
    steps.push_back(topk_step(random));
    steps.push_back(coded_step(random));
    steps.push_back(striped_step(random));
    steps.push_back(coded_scatter_step(random));
    steps.push_back(topk_step(random));
  }
  World(ranks, layout).run(steps);
}

// Every operation of a group that spans nodes, but those that move blocks.
std::vector<Step> steps_between_nodes(int ranks, Dice& random) {
  std::vector<Step> steps;
  for (int i = 0; i <= static_cast<int>(Collective::reduce); ++i) {
    steps.push_back(plain_step(ranks, random));
    Operation& operation = steps.back().operation;
    operation.collective = static_cast<Collective>(i);
    operation.algorithm = Algorithm::two_shot;
    operation.count = i == 0 ? random() % 900000 : i == 4 ? 0 : random() % 100000;
    steps.back().in_place = i == 0 ? random() % 2 == 0 : i == 3;
    steps.push_back(i % 2 == 0 ? coded_step(random) : topk_step(random));
    steps.back().feedback = random() % 2 == 0;
    steps.push_back(relayed_step(random));
    steps.push_back(coded_scatter_step(random));
  }
  return steps;
}

void between_nodes(const World::Nodes& nodes) {
  int ranks = 0;
  for (const auto& node : nodes) ranks += static_cast<int>(node.size());
  Dice random(static_cast<unsigned>(nodes.size()));
  for (int i = 0; i < 3; ++i) World(nodes, kCoded).run(steps_between_nodes(ranks, random));
}

// Small stripes that travel in rounds, and other operations between them.
std::vector<Step> small_steps(int ranks) {
  std::vector<Step> steps;
  for (const std::int64_t count : {1, 33, 500, 0, 500}) {
    steps.push_back({{Collective::all_reduce, Algorithm::two_shot, DType::f32, ReduceOp::sum, 0}});
    steps.back().operation.count = count;
    steps.back().in_place = count == 33;
  }
  steps.push_back(
      {{Collective::reduce_scatter, Algorithm::two_shot, DType::f32, ReduceOp::sum, ranks - 1, 9}});
  steps.back().in_place = false;
  steps.push_back(steps.front());
  return steps;
}
void small_among_many(const World::Nodes& nodes, int ranks) {
  for (unsigned seed = 0; seed < 5; ++seed) {
    World(nodes, kSmall, seed).run(small_steps(ranks));
  }
}

// Consecutive operations that use each other's tensors in place.
std::vector<Step> zero_copy_steps(int ranks, const std::vector<Algorithm>& algorithms,
                                  const std::vector<Collective>& others = {}) {
  std::vector<Step> steps;
  for (const Algorithm algorithm : algorithms) {
    steps.push_back({{Collective::all_reduce, algorithm, DType::f32, ReduceOp::sum, 0, 1000}});
  }
  std::vector<Collective> collectives = {Collective::reduce_scatter, Collective::all_gather,
                                         Collective::broadcast};
  collectives.insert(collectives.end(), others.begin(), others.end());
  for (const Collective collective : collectives) {
    steps.push_back({{collective, Algorithm::two_shot, DType::f32, ReduceOp::sum, ranks - 1, 100}});
    steps.back().in_place = collective == Collective::broadcast;
  }
  for (Step& step : steps) step.where = Where::window;
  return steps;
}

// A setting in which ranks fail.
struct Scene {
  World::Nodes nodes;
  Layout layout;
  std::vector<Step> steps;
};

Scene on_node(int ranks) {
  Scene scene{
      {{}},
      kSmallAndLate,
      zero_copy_steps(
          ranks, {Algorithm::two_shot, Algorithm::ring, Algorithm::tree, Algorithm::multicast},
          {Collective::reduce, Collective::gather, Collective::scatter, Collective::all_to_all})};
  for (unsigned exchanges = 0; exchanges < 4; ++exchanges) {
    scene.steps.push_back(sharded_step(100, exchanges));
  }
  for (int r = 0; r < ranks; ++r) scene.nodes[0].push_back(r);
  return scene;
}

Scene on_nodes(const World::Nodes& nodes, int ranks) {
  Scene scene{nodes, kCoded, zero_copy_steps(ranks, {Algorithm::two_shot})};
  for (const CodecKind kind : {CodecKind::int8, CodecKind::topk}) {
    Step step{{Collective::all_reduce, Algorithm::two_shot, DType::f32, ReduceOp::sum, 0, 70000}};
    step.operation.codec.kind = kind;
    if (kind == CodecKind::int8) step.operation.codec.block = 256;
    step.operation.codec.k = 1000;
    step.operation.codec.values = DType::f32;
    step.feedback = true;
    scene.steps.push_back(step);
  }
  Step scatter = scene.steps[scene.steps.size() - 2];
  scatter.operation.collective = Collective::reduce_scatter;
  scatter.operation.count = 10240;
  scene.steps.push_back(scatter);
  return scene;
}

// Every rank throws or dies in every wait, under several orders of events. Calls use(fault, seed).
template <class Use>
void each_fault(const Scene& scene, unsigned seeds, Use use) {
  World whole(scene.nodes, scene.layout);
  whole.run(scene.steps);
  for (Fault fault{0}; fault.rank < whole.size(); ++fault.rank) {
    for (fault.step = 0; fault.step < scene.steps.size(); ++fault.step) {
      for (fault.wait = 0; fault.wait < whole.waits(fault.rank, fault.step); ++fault.wait) {
        for (unsigned seed = 1; seed <= seeds; ++seed) {
          fault.dies = seed % 3 == 0;
          use(fault, seed);
        }
      }
    }
  }
}

// No rank uses a tensor that its owner has got back, and ranks that succeed have the right result.
void failures(const Scene& scene, unsigned seeds) {
  each_fault(scene, seeds, [&](const Fault& fault, unsigned seed) {
    World(scene.nodes, scene.layout, seed).run(scene.steps, fault);
  });
}

// Without retreat(), some rank does.
void failures_without_retreat(const Scene& scene, unsigned seeds) {
  int found = 0;
  each_fault(scene, seeds, [&](Fault fault, unsigned seed) {
    fault.retreats = false;
    try {
      World(scene.nodes, scene.layout, seed).run(scene.steps, fault);
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
  tests.push_back({"packets across the wrap", packets_across_the_wrap});
  for (const World::Nodes& nodes : std::vector<World::Nodes>{{{0}, {1}},
                                                             {{0, 1}, {2, 3}},
                                                             {{0, 1, 2}, {3, 4}},
                                                             {{0}, {1, 2, 3}, {4, 5}},
                                                             {{0, 2, 4}, {1, 3}},
                                                             {{0, 1}, {2, 3}, {4, 5}},
                                                             {{0}, {1}, {2}, {3}}}) {
    tests.push_back({"between nodes", [=] { between_nodes(nodes); }});
  }
  for (const int n : {9, 16, 17}) {
    World::Nodes nodes;
    for (int r = 0; r < n; ++r) nodes.push_back({r});
    tests.push_back({"small stripes among many nodes", [=] { small_among_many(nodes, n); }});
    nodes.front().push_back(n);
    tests.push_back({"and of a node of two", [=] { small_among_many(nodes, n + 1); }});
    Scene scene{nodes, kSmall, small_steps(n + 1)};
    scene.steps.resize(2);
    if (n == 9) tests.push_back({"a failure among many nodes", [=] { failures(scene, 3); }});
  }
  for (int n = 2; n <= 9; ++n) {
    tests.push_back({"plain operations", [=] { plain(n, kSmall); }});
    tests.push_back({"across the wrap of epochs", [=] { plain(n, kSmallAndLate); }});
    tests.push_back({"with large staging", [=] { plain(n, kLarge); }});
    tests.push_back({"sharded steps", [=] { sharded(n, kSmallAndLate, 0); }});
    tests.push_back({"sharded steps in another order", [=] { sharded(n, kSmall, 1); }});
    tests.push_back({"mixed with compressed ones", [=] { mixed(n, kLargePackets); }});
    tests.push_back({"mixed, with large staging", [=] { mixed(n, kLarge); }});
  }
  tests.push_back({"ranks in another order", [] { plain(4, kSmall, 1); }});
  for (int n = 2; n <= 4; ++n) {
    tests.push_back({"a failure in every wait", [=] { failures(on_node(n), 6); }});
    tests.push_back({"without retreat", [=] { failures_without_retreat(on_node(n), 6); }});
  }
  const std::pair<World::Nodes, int> layouts[] = {
      {{{0}, {1}}, 2}, {{{0, 1}, {2}}, 3}, {{{0, 2}, {1}, {3, 4}}, 5}};
  for (const auto& [nodes, n] : layouts) {
    const Scene scene = on_nodes(nodes, n);
    tests.push_back({"a failure in every wait between nodes", [=] { failures(scene, 3); }});
    tests.push_back({"and without retreat", [=] { failures_without_retreat(scene, 3); }});
  }
  return run_until_failure(tests);
}
