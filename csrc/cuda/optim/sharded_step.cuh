// The CUDA executor of the sharded optimizer step (core/algorithms/sharded_step.h): one launch, in which
// the lanes of a rank also wait for each other. Each warp takes chunks of its own, in runs of 256 elements
// as in cuda/optim/step.cuh.
#pragma once

#include <algorithm>

#include "core/algorithms/sharded_step.h"
#include "core/optim/shard.h"
#include "core/optim/table.h"
#include "cuda/comm.cuh"
#include "cuda/launch.cuh"
#include "cuda/optim/lamb_sums.cuh"
#include "cuda/optim/numbers.cuh"
#include "cuda/optim/shard_table.h"
#include "cuda/optim/step.cuh"
#include "cuda/optim/ticket.cuh"

namespace pycomm::cuda {

// Threads of a block: few enough that they get the registers that updates need.
inline constexpr int kShardThreads = 256;

// `Rule` is a row of core/optim/table.h.
template <class Rule>
class ShardedStepComm {
 public:
  __device__ explicit ShardedStepComm(const ShardedLaunch& launch)
      : comm_(launch),
        lanes_(launch.lanes),
        table_{const_cast<std::uint64_t*>(launch.tables[blockIdx.x / launch.lanes])} {}

  __device__ int rank() const { return comm_.rank(); }
  __device__ int size() const { return comm_.size(); }
  __device__ void announce() {
    const StepControl& control = table_.header().control;
    comm_.set_preflight(make_preflight(pycomm::skips(control), false));
    comm_.announce();
    for (int r = threadIdx.x; r < size() && !comm_.failed(); r += blockDim.x) {
      arenas()[r] = comm_.input(r).data - comm_.begin();
    }
    __syncthreads();
    found_ = comm_.preflight().overflow != 0;
    if (found_ && threadIdx.x == 0 && control.found_inf != nullptr) *control.found_inf = 1.0f;
  }
  __device__ void signal(int channel) { comm_.signal(channel); }
  __device__ void wait_all(int channel, std::int64_t step) { comm_.wait_all(channel, step); }

  __device__ bool measures() const { return table_.header().measures != 0; }
  __device__ void measure() {
    if (comm_.failed()) return;
    for_shards([&](const ShardRow& row, std::int64_t first, std::int64_t last) {
      const Segment& part = row.shard.part;
      for (std::int64_t c = first; c < last; ++c) {
        double sum[1] = {};
        for_runs(c, c + 1, part.count, [&](std::int64_t at, int left) {
          float g[kEight];
          load_floats<Strided>(part.grad_storage, gradients(row.shard, at, left), 0, left, g);
#pragma unroll
          for (int i = 0; i < kEight; ++i) {
            const double value = g[i];
            if (Strided::offset(i) < left) sum[0] += value * value;
          }
        });
        fold_lanes(sum);
        put_sum(kGradients, row, c, sum[0]);
      }
    });
  }
  __device__ void conclude_norm() {
    const StepHeader& header = table_.header();
    meet_lanes();
    for_nodes<1>([&](std::int64_t s, double (&sum)[1]) {
      if (!over<1>().climb(0, 0, s, header.shards, sum) || lane() != 0) return;
      *header.norm = conclude(sum[0], header.max_norm, header.control);
    });
    meet_lanes();
  }

  __device__ bool adapts() const { return table_.header().adapts != 0; }
  __device__ void measure_ratios() {
    if constexpr (kAdapts) {
      if (comm_.failed() || skips()) return;
      for_shards([&](const ShardRow& row, std::int64_t first, std::int64_t last) {
        if (group_of(row).settings.adapt) add_up_ratios(row, first, last);
      });
    }
  }
  __device__ void conclude_ratios() {
    meet_lanes();
    if (!skips()) {
      for_nodes<2>([&](std::int64_t s, double (&sum)[2]) {
        if (lane() == 0) table_.ratios()[s] = lamb_ratio(sum[0], sum[1]);
      });
    }
    meet_lanes();
  }

  __device__ void update() {
    if (comm_.failed() || skips()) return;
    for_shards([&](const ShardRow& row, std::int64_t first, std::int64_t last) {
      const auto update = [&](auto type) {
        update_chunks<typename decltype(type)::type>(row, first, last);
      };
      Rule::Elements::visit(static_cast<int>(group_of(row).choice), update);
    });
  }

  // The last lane to leave counts the step and resets the tickets of lanes.
  __device__ void finish() {
    __shared__ bool last;
    __syncthreads();
    std::uint32_t* const tickets = table_.tickets();
    if (threadIdx.x == 0) last = take_ticket(tickets + StepTable::kLeft, 1, lanes_);
    __syncthreads();
    if (last) {
      const std::int64_t counted = comm_.failed() || skips() ? 0 : table_.header().shards;
      for (std::int64_t s = threadIdx.x; s < counted; s += blockDim.x) {
        *table_.shards()[s].shard.part.step += 1.0f;
      }
      if (threadIdx.x == 0) tickets[StepTable::kCame] = tickets[StepTable::kFailed] = 0;
    }
    comm_.finish();
  }

 private:
  static constexpr bool kAdapts = Rule::kRule == pycomm::Rule::lamb;
  static constexpr int kWarps = kShardThreads / 32;

  // What a warp works on. It lies in shared memory, so that elements get the registers.
  template <class... Elements>
  struct State {
    SegmentCursor cursor;
    alignas(8) std::byte element[std::max({sizeof(Elements)...})];
    alignas(16) std::byte average[kRun * sizeof(float)];  // of a run's gradients
  };
  template <class List>
  struct StateOf;
  template <class... Elements>
  struct StateOf<TypeList<Elements...>> {
    using type = State<Elements...>;
  };
  using WarpState = typename StateOf<typename Rule::Elements>::type;

  __device__ static WarpState& state() {
    __shared__ WarpState states[kWarps];
    return states[threadIdx.x / 32];
  }
  template <class Element>
  __device__ static const Element& element() {
    return *reinterpret_cast<const Element*>(state().element);
  }

  __device__ bool skips() const { return found_ || pycomm::skips(table_.header().control); }
  __device__ const GroupRow& group_of(const ShardRow& row) const { return table_.group(row.group); }

  // Every rank's arena; valid after announce().
  __device__ static std::byte** arenas() {
    __shared__ std::byte* all[kMaxRanks];
    return all;
  }
  // The address in rank r's arena that corresponds to one in this rank's.
  template <class T>
  __device__ T* there(int r, T* here) const {
    return reinterpret_cast<T*>(arenas()[r] + (reinterpret_cast<std::uintptr_t>(here) -
                                               reinterpret_cast<std::uintptr_t>(arenas()[rank()])));
  }

  // This warp's number among the warps of the rank.
  __device__ std::int64_t warp() const {
    return static_cast<std::int64_t>(blockIdx.x) % lanes_ * kWarps + threadIdx.x / 32;
  }
  __device__ std::int64_t warps() const { return std::int64_t{lanes_} * kWarps; }

  // Returns once all lanes of this rank have come. If one of them has failed, all have.
  __device__ void meet_lanes() {
    bool stop = false;
    came_ += static_cast<std::uint32_t>(lanes_);
    __syncthreads();
    if (threadIdx.x == 0) {
      std::uint32_t* const tickets = table_.tickets();
      const auto failed = shared_word<std::uint32_t>(tickets + StepTable::kFailed);
      if (comm_.failed()) failed.store(1, ::cuda::std::memory_order_relaxed);
      __threadfence();
      atomicAdd(tickets + StepTable::kCame, 1u);
      const auto came = shared_word<std::uint32_t>(tickets + StepTable::kCame);
      while (came.load(::cuda::std::memory_order_relaxed) < came_) {
      }
      (void)came.load(::cuda::std::memory_order_acquire);  // as BlockComm::poll_flag()
      stop = failed.load(::cuda::std::memory_order_relaxed) != 0;
    }
    comm_.vote_to_stop(stop);
  }

  // Calls visit(row, first, last) for this warp's chunks of each shard.
  template <class Visit>
  __device__ void for_shards(const Visit& visit) const {
    const ShardRow* const rows = table_.shards();
    const std::int64_t count = table_.header().shards;
    const Range mine = part_of(rows[count].first_chunk, warps(), warp(), 1);
    const std::int64_t end = mine.begin + mine.count;
    for (std::int64_t at = mine.begin; at < end;) {
      const ShardRow* const row = rows + row_at(rows, count, &ShardRow::first_chunk, at);
      const std::int64_t first = row->first_chunk, next = row[1].first_chunk;
      const std::int64_t stop = next < end ? next : end;
      visit(*row, at - first, stop - first);
      at = stop;
    }
  }

  // Calls visit(at, left) for the runs of chunks [first, last) of `count` elements.
  template <class Visit>
  __device__ static void for_runs(std::int64_t first, std::int64_t last, std::int64_t count,
                                  const Visit& visit) {
    const std::int64_t end = last * kSumBlock < count ? last * kSumBlock : count;
    for (std::int64_t at = first * kSumBlock; at < end; at += kRun) {
      visit(at, static_cast<int>(end - at < kRun ? end - at : kRun));
    }
  }

  // Adds up each parameter's sums; one warp calls visit(shard, sum).
  template <int kSums, class Visit>
  __device__ void for_nodes(const Visit& visit) const {
    if (comm_.failed()) return;
    const StepHeader& header = table_.header();
    const ShardRow* const rows = table_.shards();
    const double* const sums = header.sums + (kSums == 1 ? kGradients : kWeights) * header.leaves;
    const Trees<kSums> within{table_.within(), table_.terms(),
                              table_.tickets() + StepTable::kLaneTickets};
    for (std::int64_t node = warp(); node < header.nodes; node += warps()) {
      const std::int64_t s = row_at(rows, header.shards, &ShardRow::first_node, node);
      const ShardRow& row = rows[s];
      const std::int64_t number = node - row.first_node, leaves = sum_blocks(row.shard.whole);
      const std::int64_t begin = number * kSumBlock, rest = leaves - begin;
      double sum[kSums];
      for (int k = 0; k < kSums; ++k) {
        const double* const from = sums + k * header.leaves + row.first_leaf + begin;
        sum[k] = sum_by_warp(rest < kSumBlock ? rest : kSumBlock,
                             [from](std::int64_t i) { return from[i]; });
      }
      if (within.climb(row.first_node, s, number, nodes_of(leaves), sum)) visit(s, sum);
    }
  }
  template <int kSums>
  __device__ Trees<kSums> over() const {
    const Forest within = table_.within();
    return {table_.over(), table_.terms() + 2 * within.terms(),
            table_.tickets() + StepTable::kLaneTickets + within.tickets()};
  }

  // Writes the sum of a chunk to all ranks.
  __device__ void put_sum(ShardSum kind, const ShardRow& row, std::int64_t chunk,
                          double sum) const {
    const StepHeader& header = table_.header();
    const std::int64_t leaf = row.first_leaf + row.shard.part.first / kSumBlock + chunk;
    double* const here = header.sums + kind * header.leaves + leaf;
    for (int r = lane(); r < size(); r += 32) *there(r, here) = sum;
  }

  // The address of the averages of a run's gradients; valid until the next call. Not inlined: updates
  // have no registers left for it.
  __device__ __noinline__ const void* gradients(const Shard& shard, std::int64_t at,
                                                int left) const {
    const Segment& part = shard.part;
    const auto* const own =
        static_cast<const std::byte*>(part.grad) + at * size_of(part.grad_storage);
    if (shard.is_averaged != 0) return own;
    switch (part.grad_storage) {
      case Storage::f32:
        return average(reinterpret_cast<const float*>(own), left);
      case Storage::f16:
        return average(reinterpret_cast<const Half*>(own), left);
      default:
        return average(reinterpret_cast<const BFloat16*>(own), left);
    }
  }
  template <class T>
  __device__ const void* average(const T* own, int left) const {
    float sum[kEight];
    for (int r = 0; r < size(); ++r) {
      const Eight<T> theirs = load_some<InQuads>(there(r, own), left);
#pragma unroll
      for (int i = 0; i < kEight; ++i) {
        const float next = load(theirs[i]);
        sum[i] = r == 0 ? next : combine<ReduceOp::avg>(sum[i], next);
      }
    }
    Eight<T> made;
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      made[i] = store<T>(pycomm::finish<ReduceOp::avg>(sum[i], size()));
    }
    auto* const to = reinterpret_cast<T*>(state().average);
    __syncwarp();  // all lanes are done with the last averages
    store_some(to, left, made);
    __syncwarp();
    return to;
  }

  // The warp moves to a shard.
  template <class Element>
  __device__ void enter(const ShardRow& row, const double* ratio) const {
    SegmentCursor& cursor = state().cursor;
    __syncwarp();  // all lanes are done with the last shard
    if (lane() < kFields) {
      reinterpret_cast<std::uint64_t*>(&cursor.segment)[lane()] =
          reinterpret_cast<const std::uint64_t*>(&row.shard.part)[lane()];
    }
    __syncwarp();
    if (lane() == 0) {
      const GroupRow& group = group_of(row);
      const Settings settings = settings_now(group.settings, group.lr, group.lr_is_double != 0);
      look_around(cursor, Element::kStates, settings.stochastic);
      cursor.scale = gradient_factor(settings.maximize, table_.header().control);
      new (state().element) Element(make_element<Element>(settings, cursor.step, ratio));
    }
    __syncwarp();
  }

  // Chunks [first, last) of a shard.
  __device__ void add_up_ratios(const ShardRow& row, std::int64_t first, std::int64_t last) const {
    enter<Lamb>(row, nullptr);
    const SegmentCursor& cursor = state().cursor;
    for (std::int64_t c = first; c < last; ++c) {
      double sum[2] = {};
      for_runs(c, c + 1, cursor.segment.count, [&](std::int64_t at, int left) {
        const void* const grads = gradients(row.shard, at, left);
        add_lamb_run(cursor.segment, element<Lamb>(), cursor.scale, grads, at, left, sum);
      });
      fold_lanes(sum);
      put_sum(kWeights, row, c, sum[0]);
      put_sum(kDirections, row, c, sum[1]);
    }
  }
  template <class Element>
  __device__ void update_chunks(const ShardRow& row, std::int64_t first, std::int64_t last) const {
    enter<Element>(row, table_.ratios() + (&row - table_.shards()));
    const SegmentCursor& cursor = state().cursor;
    RunKeys keys(group_of(row).settings.seed, kRun);
    for_runs(first, last, cursor.segment.count, [&](std::int64_t at, int left) {
      cuda::update(cursor, element<Element>(), keys, {at, left, gradients(row.shard, at, left), 0});
      if (cursor.segment.param_storage == Storage::f32) {
        publish(static_cast<std::uint32_t*>(cursor.segment.param) + at, left);
      } else {
        publish(static_cast<std::uint16_t*>(cursor.segment.param) + at, left);
      }
    });
  }
  // Copies new parameters, which each lane has written itself, to the other ranks.
  template <class T>
  __device__ void publish(T* own, int left) const {
    const Eight<T> made = load_some<InQuads>(own, left);
    for (int r = 0; r < size(); ++r) {
      if (r != rank()) store_some(there(r, own), left, made);
    }
  }

  BlockComm<std::byte> comm_;
  const int lanes_;
  const StepTable table_;
  std::uint32_t came_ = 0;
  bool found_ = false;  // a rank had already found an infinity
};

template <class Rule>
__global__ void __launch_bounds__(kShardThreads, 1)
    sharded_step_kernel(const __grid_constant__ ShardedLaunch launch) {
  static_assert(ShardExecutor<ShardedStepComm<Rule>>);
  ShardedStepComm<Rule> comm(launch);
  sharded_step(comm);
  comm.finish();
}

template <class Rule>
void launch_sharded_step(const ShardedLaunch& launch, cudaStream_t stream) {
  launch_resident<&sharded_step_kernel<Rule>>(launch, stream, kShardThreads);
}

}  // namespace pycomm::cuda
