// Replaces csrc/cpu/codecs/topk_comm.h, the executor for top-k: ranks exchange lists, in areas with
// the layout of core/codecs/topk.h. It does not matter here which elements a list holds: a list
// stands for its whole region.
#pragma once

#include "core/algorithms/topk_exchange.h"
#include "core/codecs/topk.h"
#include "cpu/codecs/coded_comm.h"

namespace pycomm::cpu {

struct TopkWorkspace {
  explicit TopkWorkspace(std::nullptr_t) {}
  void trim(std::uint32_t) {}
};

template <class Base>
class TopkComm {
  using Piece = checker::Piece;
  using Pieces = checker::Pieces;

 public:
  // Selects, that is, reads the whole tensor before anything is announced.
  TopkComm(Base& comm, TopkWorkspace&, const Operation& operation, const Call& call, float)
      : comm_(comm),
        area_(operation, comm.size()),
        feedback_(call.feedback),
        unit_{size_of(operation.dtype)},
        output_(static_cast<std::byte*>(call.output)),
        areas_(static_cast<std::size_t>(comm.size())) {
    auto* const input = static_cast<std::byte*>(const_cast<void*>(call.input));
    selected_ = comm_.read({input, rank()}, operation.count, unit_);
    feed(operation.count);
  }

  int rank() const { return comm_.rank(); }
  int size() const { return comm_.size(); }
  std::int64_t area_bytes(int r) const { return area_.bytes(r); }
  Preflight preflight() const { return {}; }
  bool nonfinite() const { return false; }
  std::byte* list(int r, int owner, bool result) const {
    return areas_[static_cast<std::size_t>(r)] + (result ? area_.result() : area_.list(owner));
  }
  std::int64_t room(int owner, bool result) const { return area_.room(owner, result); }
  std::int64_t list_bytes(int owner, bool result) const { return bytes(rank(), owner, result); }

  void announce() {
    comm_.announce();
    for (int r = 0; r < size(); ++r) {
      areas_[static_cast<std::size_t>(r)] = comm_.announced_area(r, area_.bytes(r));
    }
  }
  void signal(int channel) { comm_.signal(channel); }
  void wait_all(int channel, std::int64_t step) { comm_.wait_all(channel, step); }

  void stage(int owner) {
    if (!exists(owner)) return;
    write(owner, part(area_.region(owner).chunk(0))[0].symbol, false);
  }

  void reduce() {
    if (!exists(rank())) return;
    std::vector<checker::Symbol> symbols;
    for (int r = 0; r < size(); ++r) symbols.push_back(read(r, rank(), false)[0].symbol);
    write(rank(), comm_.symbols().sum(symbols, true), true);
  }

  void gather(int owner) {
    const TopkRegion region = area_.region(owner);
    if (!exists(owner)) return;
    const checker::Symbol found = read(owner, owner, true)[0].symbol;
    for (std::int64_t j = 0; j < region.chunks(); ++j) {
      const Range chunk = region.chunk(j);
      Pieces made = part(chunk);
      for (Piece& piece : made) piece.symbol = found;
      comm_.write({output_ + chunk.begin * unit_.bytes, rank()}, made, unit_);
    }
  }

 private:
  static constexpr checker::Unit kWord{4};
  static std::int64_t first_word(int owner) { return std::int64_t{owner} << 32; }
  bool exists(int owner) const { return area_.region(owner).chunks() > 0; }
  // Lists have different lengths, which readers find in the lists.
  std::int64_t bytes(int writer, int owner, bool result) const {
    const std::int64_t most = room(owner, result);
    return most == 0 ? 0 : most - (writer + owner) % 3 * 4;
  }

  Pieces read(int r, int owner, bool result) {
    const Pieces found =
        comm_.read({list(r, owner, result), r}, bytes(r, owner, result) / kWord.bytes, kWord);
    if (found.size() != 1 || found[0].element != first_word(owner)) {
      throw checker::Violation("a list is of another region");
    }
    return found;
  }
  void write(int owner, checker::Symbol symbol, bool result) {
    const Piece words{bytes(rank(), owner, result) / kWord.bytes, comm_.symbols().lossy(symbol),
                      first_word(owner)};
    comm_.write({list(rank(), owner, result), rank()}, {words}, kWord);
  }

  // Residuals keep what is not sent.
  void feed(std::int64_t count) {
    for (float* const state : {feedback_.residual, feedback_.velocity}) {
      if (state == nullptr || count == 0) continue;
      const Location location{reinterpret_cast<std::byte*>(state), rank()};
      comm_.write(location, comm_.read(location, count, {4}), {4});
    }
  }

  // The part of the selected contribution that is in a range.
  Pieces part(const Range& range) const {
    Pieces part;
    std::int64_t at = 0;
    for (const Piece& piece : selected_) {
      const std::int64_t begin = std::max(at, range.begin);
      const std::int64_t end = std::min(at + piece.units, range.begin + range.count);
      if (begin < end) part.push_back({end - begin, piece.symbol, piece.element + begin - at});
      at += piece.units;
    }
    return part;
  }

  Base& comm_;
  const TopkArea area_;
  const Feedback& feedback_;
  const checker::Unit unit_;
  std::byte* const output_;
  Pieces selected_;
  std::vector<std::byte*> areas_;
};

static_assert(ListExecutor<TopkComm<Comm>>);

}  // namespace pycomm::cpu
