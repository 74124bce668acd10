#include "cpu/optim/sharded_average.h"

#include <algorithm>

#include "core/reduce.h"
#include "cpu/loops.h"

namespace pycomm::cpu {
namespace {

// Elements whose sums stay in the first-level cache.
constexpr std::int64_t kBlock = 1024;

// to[i] = the average of to[i] + from[r][i] over the ranks, where each sum is rounded to T, as backward
// does when it adds a gradient to one that is there.
template <class T>
PYCOMM_CLONES void average_onto(T* to, const std::byte* const* from, std::int64_t count,
                                int ranks) {
  using A = accumulator_t<T>;
  A sum[kBlock];
  for (std::int64_t start = 0; start < count; start += kBlock) {
    const std::int64_t n = std::min(kBlock, count - start);
    T* const here = to + start;
    for (int r = 0; r < ranks; ++r) {
      const T* const theirs = reinterpret_cast<const T*>(from[r]) + start;
      if (r == 0) {
#pragma omp simd
        for (std::int64_t i = 0; i < n; ++i)
          sum[i] = load(store<T>(load(here[i]) + load(theirs[i])));
      } else {
#pragma omp simd
        for (std::int64_t i = 0; i < n; ++i) {
          sum[i] += load(store<T>(load(here[i]) + load(theirs[i])));
        }
      }
    }
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) here[i] = store<T>(finish<ReduceOp::avg>(sum[i], ranks));
  }
}

void average_onto(DType dtype, std::byte* to, const std::byte* const* from, std::int64_t count,
                  int ranks) {
  visit_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    if constexpr (std::is_floating_point_v<accumulator_t<T>>) {
      average_onto(reinterpret_cast<T*>(to), from, count, ranks);
    }
  });
}

}  // namespace

Call average_call(ShardedAverage& average, const std::string& label) {
  Call call;
  call.operation.collective = Collective::sharded_average;
  call.operation.dtype = DType::u8;
  call.operation.count = average.arena_bytes;
  call.input = call.output = average.arena;
  call.details.set_label(label);
  call.body = &average;
  return call;
}

void ShardedAverage::run(Comm& comm) {
  ShardedAverageComm average(comm, *this);
  sharded_average(average);
}

void ShardedAverageComm::announce() {
  comm_.announce();
  PYCOMM_CHECK(comm_.zero_copy(),
               "a sharded average needs the arenas of all ranks in their windows");
}

void ShardedAverageComm::average() {
  std::vector<const std::byte*> from(static_cast<std::size_t>(size()));
  std::int64_t bytes = 0;
  for (const OwnGradient& gradient : average_.gradients) {
    const auto dtype = static_cast<DType>(gradient.dtype);
    for (int r = 0; r < size(); ++r) {
      from[static_cast<std::size_t>(r)] = comm_.input(r).data + (gradient.from - average_.arena);
    }
    if (gradient.adds != 0) {
      average_onto(dtype, gradient.to, from.data(), gradient.count, size());
    } else {
      const ReduceLoop loop = reduce_loop(dtype, ReduceOp::avg, true);
      loop(gradient.to, reinterpret_cast<const void* const*>(from.data()), size(), 0,
           gradient.count, size());
    }
    bytes += gradient.count * size_of(dtype);
  }
  comm_.count_in(bytes * (size() - 1));
}

}  // namespace pycomm::cpu
