// The kernel of a step: blocks go through the tiles of all segments, each warp through a run of 256
// elements of a tile.
//
// Bytes per element of AdamW, and the least time for 1e9 elements at 4.3 TB/s, the rate of a copy on an
// H200:
//
//   fp32; bf16 with fp32 masters               28     6.51 ms
//   bf16 with remainders, states in fp32       26     6.05
//   the same, states in bf16                   18     4.19
//   the same, states in 8 bits                 14.06  3.27
//   bf16 alone, states in bf16                 14     3.26
#pragma once

#include <new>

#include "core/optim/lamb.h"
#include "cuda/optim/launch.h"
#include "cuda/optim/numbers.cuh"
#include "cuda/optim/ticket.cuh"
#include "cuda/runtime.cuh"

namespace pycomm::cuda {

// How a segment's numbers are moved; `any` if there is no faster way.
enum class Form : std::uint8_t { any, fp32, bf16, split, master };

// The segment that a block works on. It lies in shared memory, so that elements get the registers.
struct SegmentCursor {
  Segment segment;
  std::int32_t begin, end;  // tiles
  double step;
  float scale;  // of gradients
  Form weights;
  Storage states;  // of all states; unused for Form::any
  bool weights_at_random;
};

__device__ inline Form form_of(const Segment& s) {
  if (s.count > kMostInQuads || !takes_quads(s.param, s.param_storage) ||
      !takes_quads(s.grad, s.grad_storage) || !takes_quads(s.master, s.master_storage) ||
      s.grad_storage != s.param_storage) {
    return Form::any;
  }
  if (s.param_storage == Storage::f32) {
    return s.master_storage == Storage::none ? Form::fp32 : Form::any;
  }
  if (s.param_storage != Storage::bf16) return Form::any;
  switch (s.master_storage) {
    case Storage::none:
      return Form::bf16;
    case Storage::remainder:
      return Form::split;
    default:
      return Form::master;
  }
}

__device__ inline bool same_states(const Segment& s, int states) {
  for (int i = 0; i < states; ++i) {
    if (s.state_storage[i] != s.state_storage[0] || s.state_storage[i] == Storage::f16 ||
        !takes_quads(s.state[i], s.state_storage[i])) {
      return false;
    }
  }
  return true;
}

// Called by one thread once the segment is loaded.
__device__ inline void look_around(SegmentCursor& cursor, int states, bool stochastic) {
  const Segment& segment = cursor.segment;
  cursor.step = *segment.step + 1.0;
  cursor.weights = same_states(segment, states) ? form_of(segment) : Form::any;
  cursor.states = segment.state_storage[0];
  const bool bare = segment.master_storage == Storage::none;
  cursor.weights_at_random = stochastic && bare && segment.param_storage == Storage::bf16;
}

// The random keys of a warp's runs in a segment, which lie `stride` elements apart. A key takes 70
// instructions, so each lane makes the key of another run to come.
class RunKeys {
 public:
  __device__ RunKeys(std::uint64_t seed, std::int64_t stride) : seed_(seed), stride_(stride) {}

  // The key of the run at `at`, and its place among the runs that share the key. Called by all
  // threads of the warp, for one run after the other.
  __device__ Dice operator()(const SegmentCursor& cursor, std::int64_t at) {
    const Segment& segment = cursor.segment;
    if (next_ == 32) {
      const Random random{seed_, static_cast<std::uint32_t>(cursor.step),
                          static_cast<std::uint32_t>(segment.stream)};
      mine_ = MixedBits(random, segment.first + at + lane() * stride_);
      next_ = 0;
    }
    MixedBits bits;
    bits.first = __shfl_sync(0xffffffffu, mine_.first, next_);
    bits.second = __shfl_sync(0xffffffffu, mine_.second, next_);
    ++next_;
    return {bits, static_cast<int>(static_cast<std::uint64_t>(at) % kMixedRun),
            cursor.weights_at_random};
  }

 private:
  const std::uint64_t seed_;
  const std::int64_t stride_;
  MixedBits mine_;
  int next_ = 32;  // the lane that has the next run's key
};

// True if an update has two halves, move() and step().
template <class Element>
inline constexpr bool kInHalves = requires { Element::kInHalves; };

// Updates a run.
template <class Weights, class State, class Element>
__device__ void update_run(const SegmentCursor& cursor, const Element& element, RunKeys& keys,
                           const ElementRun& run) {
  constexpr int n_states = Element::kStates;
  const Segment& segment = cursor.segment;
  Weights weights;
  State states[n_states > 0 ? n_states : 1];
  // Before the loads: if a branch lies between a load and its use, halves and bytes are unpacked there.
  Dice dice;
  constexpr bool states_at_random = n_states > 0 && State::kRandom;
  if (states_at_random || (Weights::kRandom && cursor.weights_at_random))
    dice = keys(cursor, run.at);
  weights.load(segment, run);
#pragma unroll
  for (int s = 0; s < n_states; ++s) states[s].load(segment, s, run);
  float weight[kEight], grad[kEight], value[kMostStates][kEight] = {}, root[kEight];
#pragma unroll
  for (int s = 0; s < n_states; ++s) states[s].read(s, value[s]);
  weights.read(weight, grad);
#pragma unroll
  for (int i = 0; i < kEight; ++i) grad[i] = grad[i] * cursor.scale;
  int rooted = -1;  // the state with these roots
  if constexpr (kInHalves<Element>) {
    element.move(grad, weight, value[0], value[1], value[2]);
    element.step(weight, value[0], value[1], value[2], root);
    rooted = Element::kRooted;
  } else {
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      element(grad[i], weight[i], value[0][i], value[1][i], value[2][i]);
    }
  }
  weights.store(segment, run, weight, dice);
#pragma unroll
  for (int s = 0; s < n_states; ++s) {
    states[s].store(segment, s, run, value[s], s == rooted ? root : nullptr, dice);
  }
}

// Calls visit<Weights, State>() with the types for a segment's whole runs, unless its form is `any`.
template <class Weights, class Element, class Visit>
__device__ void visit_states(const SegmentCursor& cursor, const Visit& visit) {
  if constexpr (Element::kStates > 0) {
    if (cursor.states == Storage::bf16) {
      return visit.template operator()<Weights, PlainState<BFloat16>>();
    }
    if (cursor.states == Storage::code8) return visit.template operator()<Weights, CodedState>();
  }
  visit.template operator()<Weights, PlainState<float>>();
}
template <class Element, class Visit>
__device__ void visit_form(const SegmentCursor& cursor, const Visit& visit) {
  switch (cursor.weights) {
    case Form::any:
      return;
    case Form::fp32:
      return visit_states<PlainWeights<float>, Element>(cursor, visit);
    case Form::bf16:
      return visit_states<PlainWeights<BFloat16>, Element>(cursor, visit);
    case Form::split:
      return visit_states<SplitWeights, Element>(cursor, visit);
    case Form::master:
      return visit_states<MasterWeights, Element>(cursor, visit);
  }
}

// Updates any run. Called by all threads of a warp.
template <class Element>
__device__ void update(const SegmentCursor& cursor, const Element& element, RunKeys& keys,
                       const ElementRun& run) {
  if (run.left < kRun || cursor.weights == Form::any) {
    return update_run<AnyWeights<>, AnyState<>>(cursor, element, keys, run);
  }
  visit_form<Element>(cursor, [&]<class Weights, class State>() {
    update_run<Weights, State>(cursor, element, keys, run);
  });
}

// The last block to arrive increments the step counters: by then all blocks have read them.
__device__ inline void count_step(const Table& table, const ParamRange& params) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) last = take_ticket(table.step_ticket(), 1, gridDim.x);
  __syncthreads();
  if (!last) return;
  for (std::int64_t s = threadIdx.x; s < params.count; s += kStepThreads) {
    *table.segment(params.first + s).step += 1.0f;
  }
}

// `ratio` is LAMB's; null for 1.
template <class Element>
__device__ Element make_element(const Settings& settings, double step, const double* ratio) {
  if constexpr (std::is_same_v<Element, Lamb>) {
    return Element(settings, step, settings.adapt && ratio != nullptr ? *ratio : 1.0);
  } else {
    return Element(settings, step);
  }
}

// All threads of the block move to the segment of a tile.
template <class Element>
__device__ void enter(const StepLaunch& launch, std::int64_t tile, SegmentCursor& cursor,
                      std::byte* element) {
  const Table& table = launch.table;
  const ParamRange& params = launch.params;
  const int thread = static_cast<int>(threadIdx.x);
  __syncthreads();  // all threads are done with the previous segment
  const std::int64_t s = table.segment_at(tile, params.first, params.first + params.count);
  if (thread < kFields) {
    reinterpret_cast<std::uint64_t*>(&cursor.segment)[thread] = table.field(thread, s);
  }
  if (thread == 0) {
    cursor.begin = static_cast<std::int32_t>(table.first_tile(s));
    cursor.end = static_cast<std::int32_t>(table.first_tile(s + 1));
  }
  __syncthreads();
  if (thread == 0) {
    look_around(cursor, Element::kStates, params.settings.stochastic);
    cursor.scale = gradient_factor(params.settings.maximize, launch.control);
    new (element)
        Element(make_element<Element>(settings_now(params.settings, params.lr, params.lr_is_double),
                                      cursor.step, table.ratios() + s));
  }
  __syncthreads();
}

template <class Element>
__global__ void __launch_bounds__(kStepThreads, step_blocks(Element::kStates))
    step_kernel(const __grid_constant__ StepLaunch launch) {
  __shared__ SegmentCursor cursor;
  alignas(Element) __shared__ std::byte element[sizeof(Element)];
  const Table& table = launch.table;
  const ParamRange& params = launch.params;
  if (skips(launch.control)) return;
  // Each block has at least one tile.
  auto tile = static_cast<std::int32_t>(table.first_tile(params.first) + blockIdx.x);
  do {
    enter<Element>(launch, tile, cursor, element);
    RunKeys keys(params.settings.seed, gridDim.x * kTile);
    const auto& rule = *reinterpret_cast<const Element*>(element);
    const std::int64_t in_tile = threadIdx.x / 32 * kRun;  // this warp's run
    const auto run = [&] {
      const std::int64_t at = (tile - cursor.begin) * kTile + in_tile;
      return ElementRun{at, static_cast<int>(kRun), cursor.segment.grad, at};
    };
    // Of all tiles, only the last one may have less than a whole run for a warp.
    const std::int64_t left = cursor.segment.count - in_tile;
    const auto whole = static_cast<std::int32_t>(cursor.begin + (left + kTile - kRun) / kTile);
    visit_form<Element>(cursor, [&]<class Weights, class State>() {
      for (; tile < whole; tile += static_cast<std::int32_t>(gridDim.x)) {
        update_run<Weights, State>(cursor, rule, keys, run());
      }
    });
    for (; tile < cursor.end; tile += static_cast<std::int32_t>(gridDim.x)) {
      ElementRun rest = run();
      const std::int64_t elements = cursor.segment.count - rest.at;
      if (elements <= 0) continue;
      rest.left = static_cast<int>(elements < kRun ? elements : kRun);
      update_run<AnyWeights<>, AnyState<>>(cursor, rule, keys, rest);
    }
  } while (tile < table.first_tile(params.first + params.count));
  count_step(table, params);
}

template <class Element>
void launch_step(const StepLaunch& launch, std::int64_t blocks, cudaStream_t stream) {
  launch_blocks<&step_kernel<Element>>(blocks, launch, stream, kStepThreads);
}

}  // namespace pycomm::cuda
