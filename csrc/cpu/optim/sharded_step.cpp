#include "cpu/optim/sharded_step.h"

#include <algorithm>
#include <cstdio>

#include "cpu/executor/store_policy.h"

namespace pycomm::cpu {
namespace {

DType dtype_of(Storage storage) {
  return storage == Storage::f32 ? DType::f32 : storage == Storage::f16 ? DType::f16 : DType::bf16;
}

// A hash of everything that changes the result and must be the same on all ranks.
std::uint64_t hash_of(const ShardedStep& step) {
  std::uint64_t hash = kHashOfNothing;
  for (const auto& [settings, end] : step.groups) {
    hash = add_to_hash(add_to_hash(hash, settings), std::uint64_t(end));
  }
  for (const Shard& shard : step.shards) {
    hash = add_to_hash(hash, shard);
    hash = add_to_hash(hash, bit_cast<std::uint64_t>(double{*shard.part.step}));
  }
  return add_to_hash(hash, bit_cast<std::uint64_t>(step.max_norm));
}

std::string hex(std::uint64_t number) {
  char text[17];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(number));
  return text;
}

}  // namespace

std::string compared(const ShardedStep& step, const std::string& label) {
  return label + ", options and counts " + hex(hash_of(step));
}

Call sharded_call(ShardedStep& step, const std::string& label) {
  Call call;
  call.operation.collective = Collective::sharded_step;
  call.operation.dtype = DType::u8;
  call.operation.count = step.arena_bytes;
  call.input = call.output = step.arena;
  call.details.set_label(compared(step, label));
  if (step.control.grad_scale != nullptr) call.details.scale = *step.control.grad_scale;
  call.body = &step;
  return call;
}

// Whether this rank has already found an infinity.
Preflight ShardedStep::preflight() const { return make_preflight(skips(control), false); }

void ShardedStep::run(Comm& comm) {
  ShardedStepComm sharded(comm, *this);
  sharded_step(sharded);
}

class ShardUpdate::Average {
 public:
  Average(const ShardUpdate& update, std::size_t shard)
      : update_(update),
        part_(update.step_.shards[shard].part),
        is_averaged_(update.step_.shards[shard].is_averaged != 0),
        size_(size_of(part_.grad_storage)),
        loop_(reduce_loop(dtype_of(part_.grad_storage), ReduceOp::avg, true)) {
    for (int r = 0; r < update.size() && !is_averaged_; ++r) {
      sources_.push_back(update.there(r, part_.grad));
    }
  }

  // The gradients of `n` elements from element `at` of the part on; valid until the next call.
  const std::byte* operator()(std::int64_t at, std::int64_t n) {
    if (is_averaged_) return static_cast<const std::byte*>(part_.grad) + at * size_;
    from_.clear();
    for (const std::byte* source : sources_) from_.push_back(source + at * size_);
    loop_(mean_, from_.data(), update_.size(), 0, n, update_.size());
    return mean_;
  }

 private:
  const ShardUpdate& update_;
  const Segment& part_;
  const bool is_averaged_;
  const std::int64_t size_;
  const ReduceLoop loop_;
  std::vector<const std::byte*> sources_;
  std::vector<const void*> from_;
  alignas(kLine) std::byte mean_[kChunk * sizeof(float)];
};

ShardUpdate::ShardUpdate(ShardedStep& step)
    : step_(step),
      parts_(step.shards, [](const Shard& shard) { return shard.part.count; }),
      wholes_(step.shards, [](const Shard& shard) { return shard.whole; }),
      ratios_(step.shards.size(), 1.0) {}

void ShardUpdate::use_arenas(std::vector<std::byte*> arenas, int rank) {
  arenas_ = std::move(arenas);
  rank_ = rank;
}

void ShardUpdate::note_found(bool found) {
  found_ = found;
  if (found_ && step_.control.found_inf != nullptr) *step_.control.found_inf = 1.0f;
}

template <class Visit>
void ShardUpdate::for_chunks(const Visit& visit) const {
  step_.parallel(parts_.chunks(), [&](std::int64_t begin, std::int64_t end) {
    parts_.visit(begin, end, visit);
    stream_fence();  // signal() fences only its own thread's streamed stores
  });
}

const Settings& ShardUpdate::settings(std::size_t shard) const {
  const auto after = [](std::size_t s, const ShardGroup& group) { return s < group.end; };
  return std::upper_bound(step_.groups.begin(), step_.groups.end(), shard, after)->settings;
}

void ShardUpdate::put_sum(ShardSum kind, std::size_t shard, std::int64_t chunk, double sum) const {
  const std::int64_t place = wholes_.begin(shard) + step_.shards[shard].part.first / kChunk + chunk;
  const double* const here = step_.sums + kind * wholes_.chunks() + place;
  for (int r = 0; r < size(); ++r) *reinterpret_cast<double*>(there(r, here)) = sum;
}

double ShardUpdate::total(ShardSum kind, std::size_t shard) const {
  return sum_tree(step_.sums + kind * wholes_.chunks() + wholes_.begin(shard),
                  wholes_.chunks(shard));
}

std::int64_t ShardUpdate::measure() {
  for_chunks([&](std::size_t s, std::int64_t first, std::int64_t last) {
    const Segment& part = step_.shards[s].part;
    Average average(*this, s);
    for (std::int64_t c = first; c < last; ++c) {
      const std::int64_t at = c * kChunk, n = std::min(kChunk, part.count - at);
      const Numbers gradients{part.grad_storage, Role::weight,
                              const_cast<std::byte*>(average(at, n)), nullptr, nullptr};
      put_sum(kGradients, s, c, square_sum(gradients, 0, n));
    }
  });
  return gradient_bytes();
}

void ShardUpdate::conclude_norm() {
  std::vector<double> totals;
  for (std::size_t s = 0; s < step_.shards.size(); ++s) totals.push_back(total(kGradients, s));
  const double squares = sum_tree(totals.data(), static_cast<std::int64_t>(totals.size()));
  step_.norm = conclude(squares, step_.max_norm, step_.control);
}

bool ShardUpdate::adapts() const {
  return std::any_of(step_.groups.begin(), step_.groups.end(), [](const ShardGroup& group) {
    return group.settings.rule == Rule::lamb && group.settings.adapt;
  });
}

std::int64_t ShardUpdate::measure_ratios() {
  if (skips()) return 0;
  for_chunks([&](std::size_t s, std::int64_t first, std::int64_t last) {
    const Segment& part = step_.shards[s].part;
    if (settings(s).rule != Rule::lamb || !settings(s).adapt) return;
    const Lamb lamb(settings(s), *part.step + 1.0);
    Average average(*this, s);
    Reader reader(settings(s), part, scale(s));
    for (std::int64_t c = first; c < last; ++c) {
      const std::int64_t at = c * kChunk;
      reader.use_gradients(average(at, std::min(kChunk, part.count - at)));
      const LambSums sums = lamb_sums(lamb, reader.load_fp32(at));
      put_sum(kWeights, s, c, sums.weights);
      put_sum(kDirections, s, c, sums.directions);
    }
  });
  return gradient_bytes();
}

void ShardUpdate::conclude_ratios() {
  if (skips()) return;
  for (std::size_t s = 0; s < step_.shards.size(); ++s) {
    if (settings(s).rule != Rule::lamb || !settings(s).adapt) continue;
    ratios_[s] = lamb_ratio(total(kWeights, s), total(kDirections, s));
  }
}

std::int64_t ShardUpdate::update() {
  if (skips()) return 0;
  const bool stream = step_.arena_bytes >= kStreamedOutput;
  for_chunks([&](std::size_t s, std::int64_t first, std::int64_t last) {
    const Segment& part = step_.shards[s].part;
    const std::int64_t size = size_of(part.param_storage);
    Average average(*this, s);
    const auto take = [&](Reader& reader, std::int64_t at, std::int64_t n) {
      reader.use_gradients(average(at, n));
    };
    const auto publish = [&](std::int64_t at, std::int64_t n) {
      const std::byte* const made = static_cast<std::byte*>(part.param) + at * size;
      for (int r = 0; r < this->size(); ++r) {
        if (r != rank_) copy({there(r, made), stream}, made, n * size);
      }
    };
    cpu::update(settings(s), part, scale(s), ratios_[s], first, last, take, publish);
  });
  for (const Shard& shard : step_.shards) *shard.part.step += 1.0f;
  return gradient_bytes();
}

std::int64_t ShardUpdate::gradient_bytes() const {
  std::int64_t bytes = 0;
  for (const Shard& shard : step_.shards) {
    if (shard.is_averaged == 0) bytes += shard.part.count * size_of(shard.part.grad_storage);
  }
  return bytes * (size() - 1);
}

void ShardedStepComm::announce() {
  comm_.announce();
  PYCOMM_CHECK(comm_.zero_copy(), "a sharded step needs the arenas of all ranks in their windows");
  std::vector<std::byte*> arenas;
  for (int r = 0; r < size(); ++r) arenas.push_back(comm_.output(r).data);
  update_.use_arenas(std::move(arenas), rank());
  update_.note_found(comm_.preflight().overflow != 0);
}

}  // namespace pycomm::cpu
