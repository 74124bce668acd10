// Replaces csrc/cpu/codecs/coded_comm.h, the executor for block codecs: slots hold encoded
// elements, in the layout of core/algorithms/coded.h. An encoded block can only be decoded as a
// whole and with its own scale.
#pragma once

#include <span>

#include "core/algorithms/coded.h"
#include "core/call.h"
#include "cpu/codecs/loops.h"
#include "cpu/executor/comm.h"

namespace pycomm::cpu {

// Reads these parts of the tensor.
Preflight preflight_of(const Operation& operation, const Call& call, float limit,
                       std::span<const Range> parts);

template <class Base>
class CodedComm {
  using Piece = checker::Piece;
  using Pieces = checker::Pieces;
  using Violation = checker::Violation;

 public:
  static constexpr bool kCoded = true;

  // `comm` must have begun the operation.
  CodedComm(Base& comm, const Operation& operation, const Feedback& feedback, float,
            const CodedStaging& staging, const CodecLoops&)
      : comm_(comm),
        operation_(operation),
        feedback_(feedback),
        staging_(staging),
        payload_{staging_.payload},
        scales_{4, is_scaled(operation.codec) ? staging_.block : 0} {}

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
  CyclicChunks<CodedComm> chunks() {
    return {*this, first_element(operation_), staging_.piece(size())};
  }

  void announce() { comm_.announce(); }
  Preflight preflight() const { return {}; }
  bool nonfinite() const { return false; }
  void signal(int channel) { comm_.signal(channel); }
  void wait(int r, int channel, std::int64_t step) { comm_.wait(r, channel, step); }
  void wait_all(int channel, std::int64_t step) { comm_.wait_all(channel, step); }

  void copy(Location to, Location from, std::int64_t n) {
    if (n == 0 || (to.data == from.data && to.coded == from.coded)) return;
    const Pieces pieces = read(from, n);
    if (to.coded == kPlain) {
      comm_.write(to, pieces, comm_.unit());
    } else {
      if (from.coded == kPlain) feed(index(from, input()), n);
      write_encoded(to, from.coded == kPlain ? lossy(pieces) : pieces);
    }
  }

  template <class To, class From>
  void reduce(int n_to, To to, int n_from, From from, std::int64_t n, bool last) {
    if (n == 0) return;
    std::vector<Pieces> terms;
    for (int i = 0; i < n_from; ++i) terms.push_back(read(from(i), n));
    const Pieces sum = comm_.sum(terms, last);
    if (n_to == 1 && to(0).coded == kPlain) return store(to(0), sum, n);
    const Pieces result = lossy(sum);
    for (int i = 0; i < n_to; ++i) {
      const Location location = to(i);
      if (location.coded == kPlain) {
        feed(index(location, output()), n);
        comm_.write(location, result, comm_.unit());
      } else {
        write_encoded(location, result);
      }
    }
  }

 private:
  bool scaled() const { return scales_.elements != 0; }

  Pieces lossy(Pieces pieces) {
    for (Piece& piece : pieces) piece.symbol = comm_.symbols().lossy(piece.symbol);
    return pieces;
  }

  Location payload_of(Location location) const {
    return {staging_[location].payload, location.rank};
  }
  Location scales_of(Location location) const {
    return {reinterpret_cast<std::byte*>(staging_[location].scales), location.rank};
  }

  // Encoding reads and writes the elements' residuals.
  void feed(std::int64_t element, std::int64_t n) {
    if (feedback_.residual == nullptr) return;
    const Location residual{reinterpret_cast<std::byte*>(feedback_.residual + element), rank()};
    comm_.write(residual, lossy(comm_.read(residual, n, {4})), {4});
  }
  std::int64_t index(Location tensor, Location begin) const {
    return comm_.elements(tensor.data - begin.data);
  }

  // The output is this rank's block. What rounding it loses goes into the residual.
  void store(Location location, const Pieces& sum, std::int64_t n) {
    if (comm_.unit().bytes < 4) feed(rank() * block() + index(location, output()), n);
    comm_.write(location, sum, comm_.unit());
  }

  // Checks that blocks are blocks of the whole tensor, so that bits do not depend on how it is cut
  // into tensors and tiles.
  void check_blocks(const Location& location, const Piece& piece) const {
    const bool ends = piece.element + piece.units == comm_.called().count;
    if ((first_element(comm_.called()) + piece.element) % staging_.block != 0 ||
        location.coded % staging_.block != 0 || (piece.units % staging_.block != 0 && !ends)) {
      throw Violation("a block is cut in two");
    }
  }

  Pieces scales_for(Location location, const Pieces& pieces) const {
    Pieces scales;
    for (const Piece& piece : pieces) {
      check_blocks(location, piece);
      scales.push_back({ceil_div(piece.units, staging_.block), piece.symbol, piece.element});
      location.coded += piece.units;
    }
    return scales;
  }

  Pieces read(Location from, std::int64_t n) {
    if (from.coded == kPlain) return comm_.read(from, n, comm_.unit());
    Pieces pieces = comm_.read(payload_of(from), n, payload_);
    if (!scaled()) return pieces;
    const Pieces wanted = scales_for(from, pieces);
    if (comm_.read(scales_of(from), ceil_div(n, staging_.block), scales_) != wanted) {
      throw Violation("a block is decoded with another block's scale");
    }
    return pieces;
  }

  void write_encoded(Location to, const Pieces& pieces) {
    comm_.write(payload_of(to), pieces, payload_);
    if (scaled()) comm_.write(scales_of(to), scales_for(to, pieces), scales_);
  }

  Base& comm_;
  const Operation& operation_;
  const Feedback& feedback_;
  const CodedStaging staging_;
  const checker::Unit payload_, scales_;
};

static_assert(Executor<CodedComm<Comm>>);

}  // namespace pycomm::cpu
