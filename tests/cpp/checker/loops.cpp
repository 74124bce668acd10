// Replaces csrc/cpu/executor/loops.cpp and csrc/cpu/codecs/{loops,coded_comm}.cpp: the loops over data in
// the CPU's code between nodes.
#include "cpu/executor/loops.h"

#include "cpu/codecs/coded_comm.h"

namespace pycomm::cpu {
namespace {

using checker::Pieces;
using checker::running;
using checker::Unit;

constexpr Unit kFloat{4};

Pieces read(const void* from, std::int64_t n, Unit unit) {
  Comm& comm = running();
  return comm.memory().read(comm.thread(), static_cast<const std::byte*>(from), n, unit);
}
void write(void* to, const Pieces& pieces, Unit unit) {
  Comm& comm = running();
  comm.memory().write(comm.thread(), static_cast<std::byte*>(to), pieces, unit);
}

template <bool last>
void loop(void*, const void* const*, int, std::int64_t, std::int64_t, int) {}

template <std::int64_t bytes>
bool decode(const Encoded& from, void* output, std::int64_t n, std::int64_t) {
  write(output, read(from.payload, n, {bytes}), kFloat);
  return false;
}

template <std::int64_t bytes>
std::uint32_t narrow(const float* from, void* to, std::int64_t n, float* lost_there, float) {
  write(to, read(from, n, kFloat), {bytes});
  if (lost_there != nullptr) write(lost_there, read(lost_there, n, kFloat), kFloat);
  return 0;
}

}  // namespace

ReduceLoop reduce_loop(DType, ReduceOp, bool last) { return last ? loop<true> : loop<false>; }

void copy(Target to, const std::byte* from, std::int64_t bytes) {
  Comm& comm = running();
  comm.memory().write_bytes(comm.thread(), to.data,
                            comm.memory().read_bytes(comm.thread(), from, bytes));
}

void zero(float* to, std::int64_t n) {
  write(to, {{n, running().symbols().contribution(checker::kZero), 0}}, kFloat);
}

void reduce(ReduceLoop loop, const Target* to, int n_to, const void* const* from, int n_from,
            std::int64_t count, std::int64_t element_size, int) {
  const Unit unit{element_size};
  std::vector<Pieces> terms;
  for (int i = 0; i < n_from; ++i) terms.push_back(read(from[i], count, unit));
  const Pieces sum = running().sum(terms, loop == cpu::loop<true>, unit);
  for (int i = 0; i < n_to; ++i) write(to[i].data, sum, unit);
}

CodecLoops codec_loops(DType, const Codec& codec) {
  CodecLoops loops{};
  loops.decode = payload_size(codec) == 2 ? decode<2> : decode<4>;
  return loops;
}

NarrowLoop narrow_loop(DType dtype) { return size_of(dtype) == 2 ? narrow<2> : narrow<4>; }

Preflight preflight_of(const Operation& operation, const Call& call, float,
                       std::span<const Range> parts) {
  if (call.feedback.residual == nullptr) return {};
  const std::int64_t element = size_of(operation.dtype);
  for (const Range& part : parts) {
    read(static_cast<const std::byte*>(call.input) + part.begin * element, part.count, {element});
    read(call.feedback.residual + part.begin, part.count, kFloat);
  }
  return {};
}

}  // namespace pycomm::cpu
