// The CPU executor with a codec of blocks: the same algorithms, but slots hold encoded elements.
//
// copy() from the tensor into a slot encodes, reduce() decodes, adds and encodes, copy() from a
// slot into the tensor decodes. A sum that goes only to the output, as in reduce-scatter, is not
// encoded. In two-shot every rank encodes every contribution once and what it owns once more; in
// ring and tree every rank encodes every element once. What encoding loses goes into the residual
// of the rank that encodes, so nothing is lost in total.
//
// A rank's staging is one encoded tile: the payload of all slots, then the scales of all slots.
//
// `Base` is the executor whose ranks exchange: Comm, or Link between nodes, which uses locations of
// its own instead of slots.
#pragma once

#include <span>

#include "core/algorithms/coded.h"
#include "core/call.h"
#include "cpu/codecs/loops.h"
#include "cpu/executor/comm.h"

namespace pycomm::cpu {

// The preflight of a compressed operation on the parts of a tensor that this rank sends. If any rank
// has an overflow, or no rank uses its tensor, no rank changes its residual. `limit` is
// largest_safe().
Preflight preflight_of(const Operation& operation, const Call& call, float limit,
                       std::span<const Range> parts);
bool is_unused(const Operation& operation, const Call& call, std::span<const Range> parts);
// snapshot_residuals() copies residual and velocity if the call asks for it; put_back() restores
// them. `ranks` is the size of the whole group.
void snapshot_residuals(const Call& call, int ranks);
void put_back(const Call& call, int ranks);

template <class Base>
class CodedComm {
 public:
  static constexpr bool kCoded = true;

  // `comm` has begun the operation, and the staging is large enough for it. `limit` is
  // largest_safe(), and `loops` belong to the operation's codec.
  CodedComm(Base& comm, const Operation& operation, const Feedback& feedback, float limit,
            const CodedStaging& staging, const CodecLoops& loops);

  int rank() const { return comm_.rank(); }
  int size() const { return comm_.size(); }
  std::int64_t count() const { return comm_.count(); }
  std::int64_t block() const { return comm_.count(); }
  std::int64_t line() const { return staging_.block; }
  std::int64_t elements(std::int64_t bytes) const {
    return comm_.elements(bytes) / kLargestBlock * kLargestBlock;
  }
  bool zero_copy() const { return false; }
  Location input() const { return comm_.input(); }
  Location output() const { return comm_.output(); }
  Location input(int) const { return comm_.input(); }
  Location output(int) const { return comm_.output(); }
  Location slot(int r, std::int64_t i) const {
    return {comm_.slot(r, 0).data, r, i * staging_.slot};
  }
  std::int64_t slot_count() const { return staging_.slot; }
  Location at(Location location, std::int64_t elements) const {
    if (location.coded == kPlain) return comm_.at(location, elements);
    return {location.data, location.rank, location.coded + elements};
  }

  void announce() {
    comm_.announce();
    preflight_ = comm_.preflight();
  }
  void signal(int channel) { comm_.signal(channel); }
  void wait(int r, int channel, std::int64_t step) { comm_.wait(r, channel, step); }
  void wait_all(int channel, std::int64_t step) { comm_.wait_all(channel, step); }

  void copy(Location to, Location from, std::int64_t n);

  template <class To, class From>
  void reduce(int n_to, To to, int n_from, From from, std::int64_t n, bool last) {
    if (n == 0) return;
    for (int i = 0; i < n_from; ++i) {
      sources_[static_cast<std::size_t>(i)] = source(from(i), n);
    }
    Location encoded = to(0), output = to(n_to - 1);
    if (encoded.coded == kPlain) std::swap(encoded, output);
    if (encoded.coded == kPlain) return sum(output, n_from, n, last);
    encode(encoded, output, n_from, n, last);
  }

  // Two-shot's chunks: as large as slots allow.
  CyclicChunks<CodedComm> chunks() {
    return {*this, first_element(operation_), staging_.piece(size())};
  }
  // All ranks' preflight; valid after announce().
  const Preflight& preflight() const { return preflight_; }
  // Whether a value was not finite; once the algorithm has run, the same on every rank.
  bool nonfinite() const { return nonfinite_ || preflight_.overflow != 0; }

 private:
  std::int64_t encoded_bytes(std::int64_t n) const {
    return n * staging_.payload + (loops_.scaled ? ceil_div(n, staging_.block) * 4 : 0);
  }
  Source source(Location location, std::int64_t n);
  Pass pass_over(int n_from, std::int64_t n, bool last) const;
  void encode(Location to, Location output, int n_from, std::int64_t n, bool last);
  void sum(Location output, int n_from, std::int64_t n, bool last);
  float* residual_of(std::int64_t element) const {
    return feedback_.residual == nullptr || preflight_.unused != 0 ? nullptr
                                                                   : feedback_.residual + element;
  }
  std::int64_t index(Location tensor, std::byte* begin) const {
    return comm_.elements(tensor.data - begin);
  }

  Base& comm_;
  const Operation& operation_;
  const Feedback& feedback_;
  const float limit_;
  const Scaling scaling_;
  const CodecLoops loops_;
  const CodedStaging staging_;
  Preflight preflight_;
  bool nonfinite_ = false;
  std::int64_t own_ = 0;  // index of the own contribution among the sources' elements
  std::vector<Source> sources_;
};

static_assert(Executor<CodedComm<Comm>>);

}  // namespace pycomm::cpu
