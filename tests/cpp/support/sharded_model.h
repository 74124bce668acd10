// A model whose elements are divided among the ranks of a World, for sharded steps, and the same model
// in one piece, for the steps that they must equal.
#pragma once

#include <cstring>

#include "core/reduce.h"
#include "cpu/optim/sharded_step.h"
#include "support/dice.h"
#include "support/optim.h"
#include "support/world.h"

namespace pycomm::test {

// Random elements of a rank.
template <class T>
std::vector<T> draw(int rank, int round, std::int64_t n) {
  Dice dice(static_cast<unsigned>(10 * round + rank));
  std::vector<T> made;
  for (std::int64_t i = 0; i < n; ++i) made.push_back(store<T>(normal(dice)));
  return made;
}

// What a test varies.
struct Plan {
  Form form;
  int ranks = 2;
  std::vector<std::int64_t> counts = {};
  bool clips = false, scales = false, finds = false, averaged = false;
  bool second_group = false;

  bool measures() const { return clips || finds; }
};

// The elements of a parameter that rank r owns: [cuts[r], cuts[r + 1]).
using Cuts = std::vector<std::int64_t>;

inline Cuts random_cuts(Dice& dice, std::int64_t count, int ranks) {
  Cuts cuts = {0, count};
  for (int r = 1; r < ranks; ++r) {
    cuts.push_back(std::min(count, roll(dice, sum_blocks(count) + 1) * kSumBlock));
  }
  std::sort(cuts.begin(), cuts.end());
  return cuts;
}

template <class T>
void average_as(const std::vector<const std::byte*>& from, std::byte* to, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    float sum = 0;
    for (std::size_t r = 0; r < from.size(); ++r) {
      const float next = load(reinterpret_cast<const T*>(from[r])[i]);
      sum = r == 0 ? next : sum + next;
    }
    reinterpret_cast<T*>(to)[i] = store<T>(sum / static_cast<float>(from.size()));
  }
}

inline Bytes average(Storage storage, const std::vector<const std::byte*>& from, std::int64_t n) {
  Bytes made(bytes_of(storage, n));
  if (storage == Storage::f32) average_as<float>(from, made.data(), n);
  if (storage == Storage::f16) average_as<Half>(from, made.data(), n);
  if (storage == Storage::bf16) average_as<BFloat16>(from, made.data(), n);
  return made;
}

// The values that a step reads and writes, in memory of their own.
struct ControlMemory {
  float scale = 4.0f, found = 0.0f, clip = 0.0f;

  StepControl control(const Plan& plan) {
    return {plan.scales ? &scale : nullptr, plan.finds ? &found : nullptr,
            plan.clips ? &clip : nullptr};
  }
};

// Places in an arena; the sums come first.
struct Places {
  std::int64_t bytes = 0;
  std::vector<std::int64_t> params, grads;

  explicit Places(const Plan& plan) {
    for (const std::int64_t n : plan.counts) bytes += 3 * 8 * sum_blocks(n);
    for (const std::int64_t n : plan.counts) {
      params.push_back(take(plan.form.param, n));
      grads.push_back(take(plan.form.grad, n));
    }
  }

 private:
  std::int64_t take(Storage storage, std::int64_t n) {
    const std::int64_t begin = (bytes + kLine - 1) / kLine * kLine;
    bytes = begin + n * size_of(storage);
    return begin;
  }
};

// Memory in a rank's window.
struct Allocation {
  Allocation(std::shared_ptr<cpu::Heap> heap, std::int64_t bytes)
      : heap(std::move(heap)), data(this->heap->allocate(bytes)) {}
  ~Allocation() { heap->free(data); }
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;

  const std::shared_ptr<cpu::Heap> heap;
  std::byte* const data;
};

class ShardedModel {
 public:
  ShardedModel(World& world, const Plan& plan, unsigned seed)
      : plan_(plan), places_(plan), dice_(seed), whole_(parameters(plan.form, plan.counts)) {
    for (const std::int64_t n : plan.counts) cuts_.push_back(random_cuts(dice_, n, plan.ranks));
    for (int r = 0; r < plan.ranks; ++r) {
      ranks_.push_back(std::make_unique<Rank>(world[r], places_, kLine * (r + 1)));
      for (std::size_t p = 0; p < whole_.size(); ++p) {
        std::copy(whole_[p].param.begin(), whole_[p].param.end(), param(r, p));
        ranks_.back()->parts.push_back(part_of(r, p));
      }
    }
  }

  // Gives every rank gradients of its own, and the model in one piece their averages.
  void draw() {
    for (std::size_t p = 0; p < whole_.size(); ++p) {
      for (int r = 0; r < plan_.ranks; ++r) {
        const Bytes drawn = random_numbers(dice_, plan_.form.grad, plan_.counts[p]);
        std::copy(drawn.begin(), drawn.end(), grad(r, p));
      }
    }
    average_all();
  }
  // Overwrites one gradient of a rank.
  void spoil(int r, std::size_t p, std::int64_t i, float value) {
    if (plan_.form.grad == Storage::f32) {
      reinterpret_cast<float*>(grad(r, p))[i] = value;
    } else {
      cpu::store_chunk({plan_.form.grad, Role::weight, grad(r, p), nullptr, nullptr}, i, 1, &value,
                       nullptr);
    }
    average_all();
  }

  // Rank r's part of a step.
  cpu::ShardedStep step(int r, const cpu::Parallel& parallel) {
    Rank& rank = *ranks_[static_cast<std::size_t>(r)];
    cpu::ShardedStep step;
    step.arena = rank.arena.data;
    step.arena_bytes = places_.bytes;
    step.sums = reinterpret_cast<double*>(rank.arena.data);
    step.control = rank.memory.control(plan_);
    step.max_norm = kMaxNorm;
    step.measures = plan_.measures();
    step.parallel = parallel;
    for (std::size_t p = 0; p < whole_.size(); ++p) step.shards.push_back(shard(r, p));
    if (plan_.second_group) step.groups.push_back({plan_.form.settings, second()});
    step.groups.push_back({plan_.second_group ? other() : plan_.form.settings, whole_.size()});
    return step;
  }

  // The step of the model in one piece; returns the norm, or 0 if it is not measured.
  double step_whole(const cpu::Parallel& parallel) {
    const StepControl control = memory_.control(plan_);
    const std::vector<Segment> table = segments(plan_.form, whole_);
    const double norm = plan_.measures() ? cpu::grad_norm(table, control, kMaxNorm, parallel) : 0.0;
    const auto middle =
        table.begin() + static_cast<std::ptrdiff_t>(plan_.second_group ? second() : table.size());
    cpu::step(plan_.form.settings, {table.begin(), middle}, control, parallel);
    cpu::step(other(), {middle, table.end()}, control, parallel);
    return norm;
  }

  // Fails unless all ranks together hold the model in one piece.
  void check(const std::string& what) {
    for (int r = 0; r < plan_.ranks; ++r) {
      const std::string where = what + ", rank " + std::to_string(r) + ", parameter ";
      for (std::size_t p = 0; p < whole_.size(); ++p) {
        const std::string name = where + std::to_string(p);
        const Parameter wanted = part_of(r, p), &got = part(r, p);
        PYCOMM_CHECK(params_of(r, p) == whole_[p].param, "parameters: " + name);
        PYCOMM_CHECK(got.step == wanted.step, "step counter: " + name);
        PYCOMM_CHECK(got.master == wanted.master, "master weights: " + name);
        for (int s = 0; s < plan_.form.states; ++s) {
          PYCOMM_CHECK(got.state[s] == wanted.state[s], "states: " + name);
          PYCOMM_CHECK(got.largest[s] == wanted.largest[s], "scales of states: " + name);
        }
      }
      PYCOMM_CHECK(std::memcmp(&memory(r), &memory_, sizeof(memory_)) == 0,
                   "found_inf and clip: " + where);
    }
  }

  ControlMemory& memory(int r) { return ranks_[static_cast<std::size_t>(r)]->memory; }
  ControlMemory& memory_of_whole() { return memory_; }
  const std::vector<Parameter>& whole() const { return whole_; }
  // Where GCC 12 inlines this, it warns that what is deleted is not the heap's.
  [[gnu::noinline]] Bytes params_of(int r, std::size_t p) {
    return {param(r, p), param(r, p) + whole_[p].param.size()};
  }

 private:
  static constexpr double kMaxNorm = 0.5;

  struct Rank {
    // `before` bytes, so that arenas have different offsets.
    Rank(cpu::Group& group, const Places& places, std::int64_t before)
        : spacer(group.heap(), before), arena(group.heap(), places.bytes) {}

    Allocation spacer, arena;
    std::vector<Parameter> parts;
    ControlMemory memory;
  };

  std::byte* param(int r, std::size_t p) {
    return ranks_[static_cast<std::size_t>(r)]->arena.data + places_.params[p];
  }
  std::byte* grad(int r, std::size_t p) {
    return ranks_[static_cast<std::size_t>(r)]->arena.data + places_.grads[p];
  }
  Parameter& part(int r, std::size_t p) { return ranks_[static_cast<std::size_t>(r)]->parts[p]; }
  std::int64_t first(int r, std::size_t p) const { return cuts_[p][static_cast<std::size_t>(r)]; }
  std::int64_t count(int r, std::size_t p) const {
    return cuts_[p][static_cast<std::size_t>(r) + 1] - first(r, p);
  }
  bool is_averaged(std::size_t p) const { return plan_.averaged && p % 2 == 1; }
  std::size_t second() const { return whole_.size() / 2; }
  // Settings for the second group.
  Settings other() const {
    Settings settings = plan_.form.settings;
    settings.lr *= 2;
    settings.maximize = !settings.maximize;
    return settings;
  }

  void average_all() {
    for (std::size_t p = 0; p < whole_.size(); ++p) {
      std::vector<const std::byte*> from;
      for (int r = 0; r < plan_.ranks; ++r) from.push_back(grad(r, p));
      whole_[p].grad = average(plan_.form.grad, from, plan_.counts[p]);
    }
  }

  // The states of rank r's elements of a parameter of the model in one piece.
  Parameter part_of(int r, std::size_t p) const {
    const Parameter& whole = whole_[p];
    const std::int64_t begin = first(r, p), n = count(r, p);
    const auto slice = [&](const Bytes& from, Storage storage) {
      const std::byte* const data = from.data() + bytes_of(storage, begin);
      return Bytes(data, data + bytes_of(storage, n));
    };
    Parameter made{n, {}, {}, slice(whole.master, plan_.form.master), {}, {}, whole.step};
    for (int s = 0; s < plan_.form.states; ++s) {
      made.state[s] = slice(whole.state[s], plan_.form.state);
      if (plan_.form.state != Storage::code8 || n == 0) continue;
      const float* const scales = whole.largest[s].data();
      made.largest[s] = {scales + begin / kStateBlock,
                         scales + (begin + n + kStateBlock - 1) / kStateBlock};
    }
    return made;
  }

  Shard shard(int r, std::size_t p) {
    const std::int64_t begin = first(r, p);
    std::vector<Parameter> one = {std::move(part(r, p))};
    if (is_averaged(p)) {  // in memory that only this rank has
      const std::byte* const data = whole_[p].grad.data() + bytes_of(plan_.form.grad, begin);
      one[0].grad = Bytes(data, data + bytes_of(plan_.form.grad, one[0].count));
    }
    Shard shard{segments(plan_.form, one)[0], plan_.counts[p], is_averaged(p)};
    part(r, p) = std::move(one[0]);
    shard.part.step = &part(r, p).step;
    shard.part.param = param(r, p) + bytes_of(plan_.form.param, begin);
    if (!is_averaged(p)) shard.part.grad = grad(r, p) + bytes_of(plan_.form.grad, begin);
    shard.part.first = begin;
    shard.part.stream = p;
    return shard;
  }

  const Plan plan_;
  const Places places_;
  Dice dice_;
  std::vector<Parameter> whole_;
  ControlMemory memory_;
  std::vector<Cuts> cuts_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace pycomm::test
