// What optimizer steps on the CPU share: which chunks there are, how a chunk's numbers are loaded and
// stored, and the update of some chunks of a parameter.
#pragma once

#include <algorithm>
#include <vector>

#include "core/optim/segment.h"
#include "cpu/executor/loops.h"
#include "cpu/optim/loops.h"

namespace pycomm::cpu {

// The chunks of all segments in one sequence, so that threads can share them evenly.
class Row {
 public:
  explicit Row(const std::vector<Segment>& segments)
      : Row(segments, [](const Segment& segment) { return segment.count; }) {}
  // count(item): the number of elements.
  template <class Item, class Count>
  Row(const std::vector<Item>& items, const Count& count) {
    begins_.reserve(items.size() + 1);
    std::int64_t chunks = 0;
    for (const Item& item : items) {
      begins_.push_back(chunks);
      chunks += sum_blocks(count(item));
    }
    begins_.push_back(chunks);
  }

  std::int64_t chunks() const { return begins_.back(); }
  std::int64_t begin(std::size_t segment) const { return begins_[segment]; }
  std::int64_t chunks(std::size_t segment) const { return begins_[segment + 1] - begins_[segment]; }

  // Calls visit(segment, first, last) for each segment with chunks in [begin, end). The segment's
  // chunks are [first, last).
  template <class Visit>
  void visit(std::int64_t begin, std::int64_t end, const Visit& visit) const {
    auto it = std::upper_bound(begins_.begin(), begins_.end(), begin) - 1;
    for (auto s = static_cast<std::size_t>(it - begins_.begin()); begin < end; ++s) {
      const std::int64_t stop = std::min(end, begins_[s + 1]);
      if (begin < stop) visit(s, begin - begins_[s], stop - begins_[s]);
      begin = std::max(begin, stop);
    }
  }

 private:
  std::vector<std::int64_t> begins_;
};

// Loads and stores a segment's numbers, chunk by chunk.
class Reader {
 public:
  Reader(const Settings& settings, const Segment& segment, float scale)
      : settings_(settings), segment_(segment), scale_(scale) {
    grad_ = {segment.grad_storage, Role::weight, bytes(const_cast<void*>(segment.grad)), nullptr,
             nullptr};
    param_ = {segment.param_storage, Role::weight, bytes(segment.param), nullptr, nullptr};
    weight_ = param_;
    if (segment.master_storage != Storage::none) {
      weight_ = {segment.master_storage, Role::weight, bytes(segment.master), nullptr,
                 static_cast<std::uint16_t*>(segment.param)};
    }
    for (int s = 0; s < kMostStates; ++s) {
      state_[s] = {segment.state_storage[s], s == 0 ? Role::first_moment : Role::second_moment,
                   bytes(segment.state[s]), segment.largest[s], nullptr};
    }
    weights_at_random_ = settings.stochastic && weight_.storage == Storage::bf16;
    states_at_random_ = std::any_of(state_, state_ + kMostStates, [](const Numbers& state) {
      return size_of(state.storage) == 1 || size_of(state.storage) == 2;
    });
    if (grad_.storage == Storage::bf16) {
      if (weight_.storage == Storage::remainder) in_place_ = Weights::split;
      if (weight_.storage == Storage::bf16 && !weights_at_random_) in_place_ = Weights::bf16;
    }
    states_in_place_ = all_states_are(Storage::bf16);
  }

  // Takes the next chunks' gradients from `chunk` instead of the segment; null: from the segment.
  void use_gradients(const void* chunk) { gradients_ = bytes(const_cast<void*>(chunk)); }

  // A chunk for update_chunk().
  ChunkView load(std::int64_t at, double step) {
    ChunkView chunk = make(at);
    if (weights_at_random_ || states_at_random_) {
      chunk.random = MixedBits({settings_.seed, static_cast<std::uint32_t>(step),
                                static_cast<std::uint32_t>(segment_.stream)},
                               segment_.first + at);
    }
    chunk.weights = in_place_;
    // Loops that work in place make the bits as they go.
    if (weights_at_random_ || (states_at_random_ && !states_in_place_)) {
      draw(chunk.random, chunk.n, random_);
    }
    if (in_place_ == Weights::fp32) {
      load_weights(at, chunk);
    } else {
      chunk.g = gradients_ != nullptr ? gradients_ : grad_.data + at * 2;
      chunk.p = param_.data + at * 2;
      chunk.remainder = reinterpret_cast<std::uint16_t*>(weight_.data) + at;
    }
    chunk.bf16_states = states_in_place_;
    if (states_in_place_) {
      for (int s = 0; s < kMostStates; ++s) chunk.state[s] = state_[s].data + at * 2;
    } else {
      load_states(at, chunk);
    }
    return chunk;
  }

  // A chunk with all numbers in fp32, for reading only.
  ChunkView load_fp32(std::int64_t at) {
    ChunkView chunk = make(at);
    load_weights(at, chunk);
    load_states(at, chunk);
    return chunk;
  }

  // Writes back the numbers that load() has converted.
  void store(std::int64_t at, const ChunkView& chunk) {
    if (in_place_ == Weights::fp32) {
      const auto* p = static_cast<const float*>(chunk.p);
      store_chunk(weight_, at, chunk.n, p, weights_at_random_ ? random_ : nullptr);
      if (weight_.storage == Storage::f32) store_beside(param_, at, chunk.n, p);
    }
    for (int s = 0; s < kMostStates && !states_in_place_; ++s) {
      store_chunk(state_[s], at, chunk.n, static_cast<const float*>(chunk.state[s]), random_);
    }
  }

 private:
  static std::byte* bytes(void* data) { return static_cast<std::byte*>(data); }

  bool all_states_are(Storage storage) const {
    return std::all_of(state_, state_ + kMostStates, [storage](const Numbers& state) {
      return state.storage == storage || state.storage == Storage::none;
    });
  }

  ChunkView make(std::int64_t at) const {
    fetch_next(at + kChunk);
    ChunkView chunk{};
    chunk.n = std::min(kChunk, segment_.count - at);
    chunk.scale = scale_;
    return chunk;
  }

  void load_weights(std::int64_t at, ChunkView& chunk) {
    Numbers grad = grad_;
    if (gradients_ != nullptr) grad.data = gradients_;
    chunk.g = load_chunk(grad, gradients_ != nullptr ? 0 : at, chunk.n, g_);
    chunk.p = load_chunk(weight_, at, chunk.n, p_);
  }

  void load_states(std::int64_t at, ChunkView& chunk) {
    for (int s = 0; s < kMostStates; ++s) {
      chunk.state[s] = load_chunk(state_[s], at, chunk.n, s_[s]);
    }
  }

  // Prefetches the next chunk: a chunk is processed array by array, and the hardware prefetcher
  // stops between arrays.
  void fetch_next(std::int64_t at) const {
    if (at >= segment_.count) return;
    const std::int64_t n = std::min(kChunk, segment_.count - at);
    fetch(grad_, at, n);
    fetch(param_, at, n);
    if (weight_.data != param_.data) fetch(weight_, at, n);
    for (const Numbers& state : state_) fetch(state, at, n);
  }

  static void fetch(const Numbers& numbers, std::int64_t at, std::int64_t n) {
    prefetch(numbers.data + at * size_of(numbers.storage), n * size_of(numbers.storage));
  }

  const Settings& settings_;
  const Segment& segment_;
  float scale_;
  Numbers grad_, param_, weight_, state_[kMostStates];
  std::byte* gradients_ = nullptr;
  bool weights_at_random_, states_at_random_, states_in_place_;
  Weights in_place_ = Weights::fp32;
  float g_[kChunk], p_[kChunk], s_[kMostStates][kChunk];
  std::uint32_t random_[kChunk];
};

// Updates chunks [first, last) of a segment. Calls before(reader, at, n) and after(at, n) for each of
// them.
template <class Element, class Before, class After>
void update_with(const Element& element, const Settings& settings, const Segment& segment,
                 float scale, std::int64_t first, std::int64_t last, const Before& before,
                 const After& after) {
  Reader reader(settings, segment, scale);
  const double step = *segment.step + 1.0;
  for (std::int64_t at = first * kChunk; at < last * kChunk; at += kChunk) {
    before(reader, at, std::min(kChunk, segment.count - at));
    const ChunkView chunk = reader.load(at, step);
    update_chunk(element, chunk);
    reader.store(at, chunk);
    after(at, chunk.n);
  }
}

// The same with the element update that the settings select; `ratio` is LAMB's.
template <class Before, class After>
void update(const Settings& settings, const Segment& segment, float scale, double ratio,
            std::int64_t first, std::int64_t last, const Before& before, const After& after) {
  const double step = *segment.step + 1.0;
  const auto run = [&](const auto& element) {
    update_with(element, settings, segment, scale, first, last, before, after);
  };
  Rules::visit(settings, [&](auto type) {
    using Element = typename decltype(type)::type;
    if constexpr (std::is_constructible_v<Element, const Settings&, double, double>) {
      run(Element(settings, step, ratio));
    } else {
      run(Element(settings, step));
    }
  });
}

}  // namespace pycomm::cpu
