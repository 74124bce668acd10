#include "cpu/codecs/topk_comm.h"

#include "core/codecs/cast.h"
#include "core/codecs/feedback.h"
#include "cpu/executor/loops.h"
#include "cpu/internode/link.h"

namespace pycomm::cpu {

std::byte* TopkWorkspace::area(std::uint32_t sequence, std::int64_t bytes) {
  Area& area = areas_[sequence & 1u];
  if (area.data == nullptr || area.bytes < bytes) {
    free(area);
    area = {heap_->allocate(bytes), bytes};
  }
  area.used = sequence;
  return area.data;
}

void TopkWorkspace::trim(std::uint32_t sequence) {
  static_cast<TopkBuffers&>(*this) = TopkBuffers();
  // A rank that has completed an operation knows that every rank has completed the one before it.
  for (Area& area : areas_) {
    if (area.used != sequence) free(area);
  }
}

void TopkWorkspace::free(Area& area) {
  if (area.data != nullptr) heap_->free(area.data);
  area = {};
}

template <class Base>
TopkComm<Base>::TopkComm(Base& comm, TopkWorkspace& workspace, const Operation& operation,
                         const Call& call, float limit)
    : comm_(comm),
      workspace_(workspace),
      operation_(operation),
      feedback_(call.feedback),
      candidates_{operation.dtype,    call.input,         operation.count,      feedback_.residual,
                  feedback_.velocity, feedback_.momentum, scaling_of(feedback_)},
      limit_(limit),
      output_(call.output),
      area_(operation, comm.size()),
      areas_(static_cast<std::size_t>(comm.size())) {
  const std::uint32_t largest = workspace_.selection.prepare(candidates_, operation.codec.k);
  if (feedback_.residual == nullptr) return;
  const Range whole{0, operation.count};
  preflight_ = make_preflight(largest > magnitude(limit_), is_unused(operation, call, {&whole, 1}));
}

template <class Base>
void TopkComm<Base>::announce() {
  comm_.announce();
  for (int r = 0; r < size(); ++r) {
    areas_[static_cast<std::size_t>(r)] = comm_.announced_area(r, area_.bytes(r));
  }
  preflight_ = comm_.preflight();
  if (preflight_.unused != 0) return workspace_.selection.clear();
  if (preflight_.overflow != 0 && feedback_.residual != nullptr) {
    candidates_.limit = limit_;
    workspace_.selection.prepare(candidates_, operation_.codec.k);
  }
  workspace_.selection.collect(candidates_);
  if (feeds()) store_values(candidates_);
}

template <class Base>
void TopkComm<Base>::stage(int owner) {
  const TopkRegion target = region(owner);
  std::vector<Entry>& entries = workspace_.list;
  entries.clear();
  for (const Entry& entry : workspace_.selection.entries()) {
    if (area_.owner(entry.index / kTopkChunk) == owner) entries.push_back(entry);
  }
  keep_largest(entries, target.capacity(operation_.codec.k), workspace_.magnitudes,
               [](const Entry&) {});
  TopkWriter writer(target, operation_.codec.values, list(rank(), owner, false),
                    room(owner, false));
  const float inverse = candidates_.scaling.inverse;
  writer.write(entries, [&](const Entry& entry, float sent) {
    if (!feeds()) return;
    feedback_.residual[entry.index] = lost(entry.value, sent, inverse);
    if (feedback_.velocity != nullptr) feedback_.velocity[entry.index] = 0;
  });
}

template <class Base>
TopkReader TopkComm<Base>::reader(int r, int owner, bool result) {
  const TopkReader found = reading(r, [&] {
    return TopkReader(region(owner), operation_.codec.values, list(r, owner, result),
                      room(owner, result));
  });
  if (r != rank()) comm_.count_in(found.bytes());
  return found;
}

// Appends the sums of a chunk, added in rank order, to the list.
template <class Base>
void TopkComm<Base>::add_chunk(std::int64_t chunk) {
  std::vector<float>& sums = workspace_.sums;
  const Range range = region(rank()).chunk(chunk);
  const auto add = [&](std::int64_t i, float value) { sums[static_cast<std::size_t>(i)] += value; };
  for (int r = 0; r < size(); ++r) {
    reading(r, [&] { readers_[static_cast<std::size_t>(r)].read(chunk, add); });
  }
  Hits hits;
  const Tiles stretches{range.count, kStretch};
  for (std::int64_t t = 0; t < stretches.count(); ++t) {
    const Range stretch = stretches[t];
    mark_nonzero(sums.data() + stretch.begin, stretch.count, hits.bytes);
    hits.each(stretch.count, [&](std::int64_t i) {
      float& sum = sums[static_cast<std::size_t>(stretch.begin + i)];
      const std::int64_t index = range.begin + stretch.begin + i;
      workspace_.list.push_back({static_cast<std::uint32_t>(index), sum});
      sum = 0;
    });
  }
}

template <class Base>
void TopkComm<Base>::reduce() {
  for (int r = 0; r < size(); ++r) readers_.push_back(reader(r, rank(), false));
  workspace_.sums.resize(static_cast<std::size_t>(kTopkChunk));
  workspace_.list.clear();
  const TopkRegion mine = region(rank());
  for (std::int64_t j = 0; j < mine.chunks(); ++j) add_chunk(j);
  keep_largest(workspace_.list, mine.share(operation_.codec.k), workspace_.magnitudes,
               [&](const Entry& entry) {
                 if (!feeds()) return;
                 feedback_.residual[entry.index] += entry.value * candidates_.scaling.inverse;
               });
  readers_.clear();
  write_result();
}

// The result for all ranks, in the tensor's type; the rest of the sums stays in the residual.
template <class Base>
void TopkComm<Base>::write_result() {
  const TopkRegion mine = region(rank());
  const float divisor =
      operation_.op == ReduceOp::avg ? static_cast<float>(comm_.contributors()) : 1.0f;
  for (Entry& entry : workspace_.list) entry.value /= divisor;
  const float factor = divisor * candidates_.scaling.inverse;
  TopkWriter writer(mine, operation_.codec.values, list(rank(), rank(), true), room(rank(), true));
  writer.write(workspace_.list, [&](const Entry& entry, float sent) {
    if (feeds()) feedback_.residual[entry.index] += lost(entry.value, as_stored(sent), factor);
  });
}

template <class Base>
void TopkComm<Base>::gather(int owner) {
  const TopkReader list = reader(owner, owner, true);
  reading(owner, [&] {
    visit_dtype(operation_.dtype, [&](auto element) {
      using T = decltype(element);
      if constexpr (std::is_same_v<accumulator_t<T>, float>) scatter<T>(list, region(owner));
    });
  });
}

template <class Base>
template <class T>
void TopkComm<Base>::scatter(const TopkReader& list, const TopkRegion& region) {
  const bool stream = operation_.count * static_cast<std::int64_t>(sizeof(T)) > kCachedOutput;
  workspace_.chunk.resize(static_cast<std::size_t>(kTopkChunk) * sizeof(float));
  T* const made = reinterpret_cast<T*>(workspace_.chunk.data());
  for (std::int64_t j = 0; j < region.chunks(); ++j) {
    const Range chunk = region.chunk(j);
    std::fill_n(made, chunk.count, T{});
    list.read(j, [&](std::int64_t i, float value) {
      made[i] = store<T>(value);
      nonfinite_ |= magnitude(load(made[i])) >= kInfinityBits;
    });
    std::byte* const to = reinterpret_cast<std::byte*>(static_cast<T*>(output_) + chunk.begin);
    cpu::copy({to, stream}, workspace_.chunk.data(),
              chunk.count * static_cast<std::int64_t>(sizeof(T)));
  }
  stream_fence();  // another thread may read it next
}

template <class Base>
float TopkComm<Base>::as_stored(float value) const {
  switch (operation_.dtype) {
    case DType::f16:
      return load(store<Half>(value));
    case DType::bf16:
      return load(store<BFloat16>(value));
    default:
      return value;
  }
}

template class TopkComm<Comm>;
template class TopkComm<Link>;

}  // namespace pycomm::cpu
