// What a ring or a double tree of nodes (core/algorithms/relay.h) passes on: pieces of plain tensors,
// and encoded blocks.
#pragma once

#include "core/algorithms/relay.h"
#include "cpu/internode/stages.h"

namespace pycomm::cpu {

// A plain tensor, sent from its memory.
class PlainPieces {
 public:
  // `data` has this node's contribution, and gets the result. The largest piece has `piece` elements.
  PlainPieces(Link& link, const Operation& operation, std::byte* data, std::int64_t piece,
              Scratch& scratch);

  void combine(const RelayStep& step, std::int64_t i);
  Batch transfers(const RelayStep& sent, const RelayStep& received, std::int64_t i) const;

 private:
  std::byte* at(const Range& piece) const { return data_ + piece.begin * element_size_; }
  std::byte* incoming(std::int64_t i, int which) const {
    return incoming_ + (i % kStepsAhead * 2 + which) * piece_bytes_;
  }

  Link& link_;
  std::byte* const data_;
  const std::int64_t element_size_, piece_bytes_;
  const ReduceLoop loop_, last_loop_;
  std::byte* const incoming_;
};

// Encoded blocks. Every piece has an area, which holds what this node has encoded, and in the end the
// complete sum as the node that made it has encoded it.
class CodedPieces {
 public:
  // `layout` is for the largest of `pieces` pieces.
  CodedPieces(Link& link, CodedComm<Link>& coded, const EncodedAreas& layout, std::int64_t pieces,
              Scratch& scratch);

  void combine(const RelayStep& step, std::int64_t i);
  Batch transfers(const RelayStep& sent, const RelayStep& received, std::int64_t i) const;

 private:
  Location kept(const RelayStep& step) const {
    return {areas_ + step.number * layout_.bytes, link_.rank(), 0};
  }
  Location incoming(const RelayStep& step, std::int64_t i, int which) const {
    const std::int64_t index = pieces_ + i % kStepsAhead * 2 + which;
    return {areas_ + index * layout_.bytes, step.from[which], 0};
  }

  Link& link_;
  CodedComm<Link>& coded_;
  const EncodedAreas layout_;
  const std::int64_t pieces_;
  std::byte* const areas_;
};

// A relay as the only tile of an exchange (core/algorithms/internode.h).
template <class Steps>
class RelayStages {
 public:
  RelayStages(Link& link, const Steps& steps, CodedPieces& pieces)
      : link_(link), steps_(steps), pieces_(pieces) {}

  static constexpr std::int64_t tiles() { return 1; }
  static constexpr bool reduces() { return true; }
  static constexpr bool gathers() { return false; }
  void stage(std::int64_t) {}
  Batch staged(std::int64_t) const { return {}; }
  void reduce(std::int64_t) { relay(link_, steps_, pieces_); }
  Batch reduced(std::int64_t) const { return {}; }
  void meanwhile(std::int64_t) {}
  void gather(std::int64_t) {}

 private:
  Link& link_;
  const Steps steps_;
  CodedPieces& pieces_;
};

}  // namespace pycomm::cpu
