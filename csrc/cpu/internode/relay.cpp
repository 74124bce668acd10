#include "cpu/internode/relay.h"

namespace pycomm::cpu {

PlainPieces::PlainPieces(Link& link, const Operation& operation, std::byte* data,
                         std::int64_t piece, Scratch& scratch)
    : link_(link),
      data_(data),
      element_size_(size_of(operation.dtype)),
      piece_bytes_(piece * element_size_),
      loop_(reduce_loop(operation.dtype, operation.op, false)),
      last_loop_(reduce_loop(operation.dtype, operation.op, true)),
      incoming_(scratch.bytes(2 * kStepsAhead * piece_bytes_)) {}

void PlainPieces::combine(const RelayStep& step, std::int64_t i) {
  if (step.from[0] < 0 && step.from[1] < 0) return;
  const Target here{at(step.piece), false};
  if (!step.adds) return copy(here, incoming(i, 0), step.piece.count * element_size_);
  const void* terms[3];
  int n = 0;
  if (step.from[0] >= 0) terms[n++] = incoming(i, 0);
  terms[n++] = here.data;
  if (step.from[1] >= 0) terms[n++] = incoming(i, 1);
  cpu::reduce(step.completes ? last_loop_ : loop_, &here, 1, terms, n, step.piece.count,
              element_size_, link_.contributors());
}

Batch PlainPieces::transfers(const RelayStep& sent, const RelayStep& received,
                             std::int64_t i) const {
  Batch batch;
  for (int j = 0; j < 2; ++j) {
    if (sent.to[j] >= 0) {
      batch.sends.push_back({sent.to[j], at(sent.piece), sent.piece.count * element_size_});
    }
    if (received.from[j] >= 0) {
      batch.receives.push_back(
          {received.from[j], incoming(i, j), received.piece.count * element_size_});
    }
  }
  return batch;
}

CodedPieces::CodedPieces(Link& link, CodedComm<Link>& coded, const EncodedAreas& layout,
                         std::int64_t pieces, Scratch& scratch)
    : link_(link),
      coded_(coded),
      layout_(layout),
      pieces_(pieces),
      areas_(scratch.bytes((pieces + 2 * kStepsAhead) * layout.bytes)) {}

void CodedPieces::combine(const RelayStep& step, std::int64_t i) {
  const std::int64_t n = step.piece.count;
  const Location own = coded_.at(coded_.input(), step.piece.begin);
  const Location output = coded_.at(coded_.output(), step.piece.begin);
  const int before = step.from[0] >= 0 ? 1 : 0, after = step.from[1] >= 0 ? 1 : 0;
  if (!step.adds) {
    if (before == 0) return;  // a root has written its output
    coded_.copy(kept(step), incoming(step, i, 0), n);
    coded_.copy(output, kept(step), n);
  } else if (before + after == 0) {
    coded_.copy(kept(step), own, n);
  } else {
    const auto to = [&](int j) { return j == 0 ? kept(step) : output; };
    const auto from = [&](int j) {
      return j < before ? incoming(step, i, 0) : j == before ? own : incoming(step, i, 1);
    };
    coded_.reduce(step.completes ? 2 : 1, to, 1 + before + after, from, n, step.completes);
  }
}

Batch CodedPieces::transfers(const RelayStep& sent, const RelayStep& received,
                             std::int64_t i) const {
  Batch batch;
  for (int j = 0; j < 2; ++j) {
    if (sent.to[j] >= 0) {
      layout_.add_transfers(batch.sends, sent.to[j], kept(sent), sent.piece.count);
    }
    if (received.from[j] >= 0) {
      layout_.add_transfers(batch.receives, received.from[j], incoming(received, i, j),
                            received.piece.count);
    }
  }
  return batch;
}

}  // namespace pycomm::cpu
