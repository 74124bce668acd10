// Costs (core/cost.h) against what the executors count when they run.
#include <algorithm>
#include <vector>

#include "core/cost.h"
#include "core/message.h"
#include "support/world.h"

namespace pycomm::test {
namespace {

constexpr std::int64_t kStaging = 16 << 10;  // small, so that there are many tiles
constexpr std::int64_t kCounts[] = {0, 1, 13, 16, 17, 1000, 20'011, 150'001};
constexpr Algorithm kAlgorithms[] = {Algorithm::automatic, Algorithm::one_shot, Algorithm::two_shot,
                                     Algorithm::ring, Algorithm::tree};

Operation plain(Collective collective, Algorithm algorithm, std::int64_t count) {
  return {collective, algorithm, DType::f32, ReduceOp::sum, 0, count};
}

Operation coded(Algorithm algorithm, CodecKind kind, std::int64_t count, DType values) {
  Operation operation = plain(Collective::all_reduce, algorithm, count);
  operation.codec.kind = kind;
  operation.codec.values = values;
  operation.codec.block = kind == CodecKind::int8 ? 256 : 0;
  operation.codec.k = static_cast<std::uint32_t>(kind == CodecKind::topk ? count / 50 : 0);
  return operation;
}

std::string text(const Traffic& t) {
  return std::to_string(t.steps) + " steps, " + std::to_string(t.bytes_in) + " bytes in, " +
         std::to_string(t.bytes_out) + " out";
}

void equal(const Traffic& counted, const Traffic& cost, const Operation& operation) {
  PYCOMM_CHECK(counted.steps == cost.steps && counted.bytes_in == cost.bytes_in &&
                   counted.bytes_out == cost.bytes_out,
               describe(operation) + " takes " + text(counted) + ", not " + text(cost));
}

// Blocks of all ranks, in the windows or in ordinary memory.
class Tensors {
 public:
  Tensors(cpu::Group& group, std::int64_t bytes, bool in_window) : heap_(group.heap()) {
    if (in_window) {
      x = heap_->allocate(bytes);
      y = heap_->allocate(bytes);
    } else {
      own_.resize(static_cast<std::size_t>(2 * bytes));
      x = own_.data();
      y = x + bytes;
    }
    in_window_ = in_window;
  }
  ~Tensors() {
    if (!in_window_) return;
    heap_->free(x);
    heap_->free(y);
  }
  Tensors(const Tensors&) = delete;
  Tensors& operator=(const Tensors&) = delete;

  std::byte* x;
  std::byte* y;

 private:
  std::shared_ptr<cpu::Heap> heap_;
  std::vector<std::byte> own_;
  bool in_window_;
};

void costs_what_is_counted(cpu::Group& group, const Operation& operation, bool in_window) {
  const std::int64_t bytes = (operation.count + 1) * 4 * group.size();
  Tensors tensors(group, bytes, in_window);
  group.run(operation, tensors.x, tensors.y);
  equal(group.comm().traffic(), group.cost(operation, in_window), operation);
}

void collectives(int n) {
  World world(n, kStaging);
  world.run([&](int r) {
    for (const std::int64_t count : kCounts) {
      for (const bool in_window : {false, true}) {
        for (const Algorithm algorithm : kAlgorithms) {
          costs_what_is_counted(world[r], plain(Collective::all_reduce, algorithm, count),
                                in_window);
        }
        for (const Collective collective :
             {Collective::reduce_scatter, Collective::all_gather, Collective::broadcast,
              Collective::reduce, Collective::gather, Collective::scatter,
              Collective::all_to_all}) {
          Operation operation = plain(collective, Algorithm::two_shot, count);
          operation.root = n - 1;
          costs_what_is_counted(world[r], operation, in_window);
        }
      }
    }
    costs_what_is_counted(world[r], plain(Collective::barrier, Algorithm::one_shot, 0), false);
  });
}

void dtypes() {
  World world(3, kStaging);
  world.run([&](int r) {
    for (int dtype = 0; dtype < kCountOf<DType>; ++dtype) {
      for (const Algorithm algorithm : kAlgorithms) {
        for (const std::int64_t count : {7, 40, 3001}) {
          Operation operation = plain(Collective::all_reduce, algorithm, count);
          operation.dtype = static_cast<DType>(dtype);
          const std::int64_t bytes = count * size_of(operation.dtype);
          Tensors tensors(world[r], bytes, false);
          world[r].run(operation, tensors.x, tensors.y);
          equal(world[r].comm().traffic(), world[r].cost(operation, false), operation);
        }
      }
    }
  });
}

void codecs(int n) {
  World world(n, 64 << 10);
  world.run([&](int r) {
    for (const std::int64_t count : kCounts) {
      for (const Algorithm algorithm : {Algorithm::two_shot, Algorithm::ring, Algorithm::tree}) {
        for (const CodecKind kind : {CodecKind::int8, CodecKind::cast}) {
          Operation operation = coded(algorithm, kind, count, DType::bf16);
          costs_what_is_counted(world[r], operation, false);
          operation.offset = 3;  // blocks of kSmallestBlock
          operation.codec.block = kind == CodecKind::int8 ? 128 : 0;
          costs_what_is_counted(world[r], operation, false);
          operation.collective = Collective::reduce_scatter;
          costs_what_is_counted(world[r], operation, false);
        }
      }
    }
  });
}

// Ranks whose largest elements lie so that every list is full.
void lists(int n) {
  const std::int64_t count = kTopkChunk * n;
  World world(n, 64 << 10);
  world.run([&](int r) {
    for (const DType values : {DType::f32, DType::bf16, DType::u8}) {
      Operation operation = coded(Algorithm::two_shot, CodecKind::topk, count, values);
      operation.codec.k = static_cast<std::uint32_t>(count);
      std::vector<float> x(static_cast<std::size_t>(count), 1.0f), y(x.size());
      world[r].run(operation, x.data(), y.data());
      equal(world[r].comm().traffic(), world[r].cost(operation, false), operation);

      operation.codec.k = static_cast<std::uint32_t>(count / 100);
      world[r].run(operation, x.data(), y.data());
      const Traffic counted = world[r].comm().traffic(), cost = world[r].cost(operation, false);
      PYCOMM_CHECK(counted.steps == cost.steps && counted.bytes_in <= cost.bytes_in,
                   "a list cannot be longer than its room");
    }
  });
}

void wire_bytes_are_the_most(int ranks) {
  constexpr CostRank kNoPackets{0, 0, 1 << 20, 0, false};
  for (const std::int64_t n : {0, 1, 1000, 16'384, 16'385, 70'000, 500'000, 1'000'003}) {
    for (const CodecKind kind : {CodecKind::int8, CodecKind::cast, CodecKind::topk}) {
      for (const int part : {1, 3, 100}) {
        Operation operation = coded(Algorithm::two_shot, kind, n, DType::f32);
        operation.codec.k = static_cast<std::uint32_t>(n / part);
        std::int64_t most = 0;
        for (int r = 0; r < ranks; ++r) {
          CostRank rank = kNoPackets;
          rank.rank = r;
          rank.size = ranks;
          most = std::max(most, cost_of(operation, rank).bytes_in);
        }
        PYCOMM_CHECK(wire_bytes(operation.codec, n, ranks) == most,
                     describe(operation) + " among " + std::to_string(ranks));
      }
    }
  }
}

void between_nodes(const std::vector<int>& hosts) {
  World world(hosts, 256 << 10);
  const auto nodes = static_cast<std::int64_t>(hosts.size());
  world.run([&](int r) {
    cpu::Group& group = world[r];
    const bool carries = group.comm().rank() < *std::min_element(hosts.begin(), hosts.end());
    const std::int64_t handshakes =
        carries ? (nodes - 1) * static_cast<std::int64_t>(sizeof(Handshake)) : 0;
    const auto check = [&](const Operation& operation, bool at_most = false,
                           std::int64_t lengths = 0) {
      std::vector<float> x(static_cast<std::size_t>(operation.count * group.size()), 1.0f), y(x);
      group.run(operation, x.data(), y.data());
      const LinkTraffic counted = group.link_traffic(), cost = group.link_cost(operation);
      const std::int64_t extra = handshakes + lengths;
      const bool equal =
          counted.sent == cost.sent + extra && counted.received == cost.received + extra;
      const bool within =
          counted.sent <= cost.sent + extra && counted.received <= cost.received + extra;
      PYCOMM_CHECK(at_most ? within : equal,
                   describe(operation) + " sends " + std::to_string(counted.sent) +
                       " and receives " + std::to_string(counted.received) + ", not " +
                       std::to_string(cost.sent) + " and " + std::to_string(cost.received));
      PYCOMM_CHECK(carries || moves_blocks(operation.collective) || cost.sent + cost.received == 0,
                   "who has no link sends nothing");
    };
    for (const std::int64_t count : {1, 1000, 20'011, 300'001}) {
      for (int root = 0; root < group.size(); ++root) {
        for (const Collective collective :
             {Collective::broadcast, Collective::reduce, Collective::gather, Collective::scatter}) {
          Operation operation = plain(collective, Algorithm::two_shot, count);
          operation.root = root;
          check(operation);
        }
      }
      check(plain(Collective::all_reduce, Algorithm::automatic, count));
      check(plain(Collective::reduce_scatter, Algorithm::two_shot, count));
      check(plain(Collective::all_gather, Algorithm::two_shot, count));
      check(plain(Collective::all_to_all, Algorithm::two_shot, count));
      for (const CodecKind kind : {CodecKind::int8, CodecKind::cast}) {
        Operation operation = coded(Algorithm::two_shot, kind, count, DType::bf16);
        check(operation);
        operation.offset = 6;
        check(operation);
      }
      for (const CodecKind kind : {CodecKind::int8, CodecKind::cast}) {
        Operation operation = coded(Algorithm::two_shot, kind, count, DType::bf16);
        operation.collective = Collective::reduce_scatter;
        check(operation, false, carries ? nodes - 1 : 0);  // whether all is finite
      }
      check(coded(Algorithm::two_shot, CodecKind::topk, count, DType::f32), true,
            carries ? 2 * (nodes - 1) * 8 : 0);
    }
    check(plain(Collective::barrier, Algorithm::one_shot, 0));
  });
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm;
  using namespace pycomm::test;
  return run_all({
      {"collectives",
       [] {
         for (int n = 1; n <= 5; ++n) collectives(n);
       }},
      {"dtypes", dtypes},
      {"int8 and casts",
       [] {
         for (int n = 1; n <= 4; ++n) codecs(n);
       }},
      {"top-k",
       [] {
         for (int n = 1; n <= 3; ++n) lists(n);
       }},
      {"wire bytes",
       [] {
         for (int n = 1; n <= 9; ++n) wire_bytes_are_the_most(n);
       }},
      {"between nodes",
       [] {
         for (const std::vector<int>& hosts :
              std::vector<std::vector<int>>{{1, 1}, {2, 2}, {1, 3}, {2, 1, 3}}) {
           between_nodes(hosts);
         }
       }},
  });
}
