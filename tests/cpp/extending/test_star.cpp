// The algorithm of docs/contributing/extending.md, which is not in the library, on both executors,
// against plain integer arithmetic. Small staging areas make tiles and slots wrap around many
// times.
#include <algorithm>
#include <string>
#include <vector>

#include "core/reduce.h"
#include "cuda/launch.h"
#include "extending/ranks.h"
#include "extending/table.h"
#include "support/run_all.h"

namespace pycomm::test {
namespace {

// Announcements must name an algorithm that the library knows.
Operation all_reduce(DType dtype, ReduceOp op, std::int64_t count) {
  return {Collective::all_reduce, Algorithm::one_shot, dtype, op, 0, count};
}

template <class Visit>
void visit_star(int ranks, Visit visit) {
  AlgorithmsAndStar::visit(kStar, ranks, visit);
}

constexpr std::int64_t kStaging = 16 << 10;

template <class T>
void run(CpuRanks& ranks, const Operation& operation, const std::vector<T*>& in,
         const std::vector<T*>& out) {
  ranks.run([&](cpu::Comm& comm, std::size_t r) {
    comm.begin(operation, in[r], out[r], nullptr);
    visit_star(comm.size(), [&](auto row) { row.run(comm); });
    comm.finish();
  });
}

template <class T>
void run(DeviceRanks& ranks, const Operation& operation, const std::vector<T*>& in,
         const std::vector<T*>& out) {
  for (std::size_t r = 0; r < in.size(); ++r) ranks.put(r, operation, in[r], out[r]);
  ranks.run([](const cuda::Launch& launch) {
    visit_star(launch.layout.ranks, [&](auto row) {
      if constexpr (std::is_same_v<decltype(row), Star>) cuda::launch_plain<Star>(launch, nullptr);
    });
  });
}

// Small values, so that every type represents every sum exactly.
int value(int rank, std::size_t i, int round) {
  return (static_cast<int>(i) * 7 + rank * 31 + round * 13) % 11;
}

int expected(ReduceOp op, int n, std::size_t i, int round) {
  int sum = 0, most = 0;
  for (int r = 0; r < n; ++r) {
    sum += value(r, i, round);
    most = std::max(most, value(r, i, round));
  }
  return op == ReduceOp::sum ? sum : most;
}

template <class T, class Ranks>
void compare(Ranks& ranks, int n, const Operation& operation, bool in_place, int round) {
  const auto count = static_cast<std::size_t>(operation.count);
  std::vector<std::vector<T>> x, y;
  std::vector<T*> in, out;
  for (int r = 0; r < n; ++r) {
    x.emplace_back();
    for (std::size_t i = 0; i < count; ++i) {
      x.back().push_back(store<T>(static_cast<accumulator_t<T>>(value(r, i, round))));
    }
    y.emplace_back(count);
  }
  for (int r = 0; r < n; ++r) {
    in.push_back(x[static_cast<std::size_t>(r)].data());
    out.push_back(in_place ? in.back() : y[static_cast<std::size_t>(r)].data());
  }
  run(ranks, operation, in, out);
  for (int r = 0; r < n; ++r) {
    for (std::size_t i = 0; i < count; ++i) {
      PYCOMM_CHECK(load(out[static_cast<std::size_t>(r)][i]) ==
                       static_cast<accumulator_t<T>>(expected(operation.op, n, i, round)),
                   std::string(name_of(operation.dtype)) + ", element " + std::to_string(i) +
                       " of " + std::to_string(count) + " on rank " + std::to_string(r));
    }
  }
}

template <class Ranks>
void all_reduces(int n, const std::vector<std::int64_t>& counts) {
  Ranks ranks(n, kStaging);
  int round = 0;
  for (const std::int64_t count : counts) {
    for (int dtype = 0; dtype < kCountOf<DType>; ++dtype) {
      for (const ReduceOp op : {ReduceOp::sum, ReduceOp::max}) {
        const Operation operation = all_reduce(static_cast<DType>(dtype), op, count);
        ++round;
        visit_dtype(operation.dtype, [&](auto element) {
          compare<decltype(element)>(ranks, n, operation, round % 2 == 0, round);
        });
      }
    }
  }
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm::test;
  std::vector<std::pair<const char*, std::function<void()>>> tests;
  for (int n = 1; n <= 5; ++n) {
    tests.push_back({"threads", [n] { all_reduces<CpuRanks>(n, {0, 1, 33, 1000, 20011}); }});
    tests.push_back({"a kernel", [n] { all_reduces<DeviceRanks>(n, {1, 5003}); }});
  }
  tests.push_back({"threads, 9 ranks", [] { all_reduces<CpuRanks>(9, {1, 20011}); }});
  return run_all(tests);
}
