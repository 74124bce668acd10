#include "cpu/optim/measured_average.h"

#include <algorithm>

#include "cpu/optim/loops.h"
#include "cpu/optim/update.h"

namespace pycomm::cpu {
namespace {

// Chunks that are averaged before their squares are added up: they stay in the second-level cache,
// and are long enough for StorePolicy to time.
constexpr std::int64_t kTogether = 16;

Storage storage_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return Storage::f32;
    case DType::f16:
      return Storage::f16;
    case DType::bf16:
      return Storage::bf16;
    default:
      return Storage::none;
  }
}

}  // namespace

MeasuredAverage::MeasuredAverage(Call average, std::vector<Range> gradients, double* sums)
    : call_(std::move(average)), gradients_(std::move(gradients)), sums_(sums) {
  PYCOMM_CHECK(storage_of(call_.operation.dtype) != Storage::none,
               "a measured average needs gradients in fp32, fp16 or bf16");
  call_.operation.algorithm = Algorithm::two_shot;
  call_.details.set_label("with sums of squares");
  call_.body = this;
}

void MeasuredAverage::run(Comm& comm) {
  comm.announce();
  PYCOMM_CHECK(comm.zero_copy(), "a measured average needs the buckets of all ranks in windows");
  const auto average = [&](std::int64_t begin, std::int64_t end) {
    const auto to = [&](int r) { return comm.at(comm.output(r), begin); };
    const auto from = [&](int r) { return comm.at(comm.input(r), begin); };
    comm.reduce(comm.size(), to, comm.size(), from, end - begin, true);
  };
  const Numbers bucket{storage_of(call_.operation.dtype), false, comm.output().data, nullptr,
                       nullptr};
  const Row chunks(gradients_, [](const Range& gradient) { return gradient.count; });
  const Range mine = part_of(chunks.chunks(), comm.size(), comm.rank(), 1);
  std::fill_n(sums_, chunks.chunks(), 0.0);
  const auto visit = [&](std::size_t g, std::int64_t first, std::int64_t last) {
    const std::int64_t origin = gradients_[g].begin, end = origin + gradients_[g].count;
    for (std::int64_t c = first; c < last; c += kTogether) {
      const std::int64_t stop = std::min(c + kTogether, last);
      average(origin + c * kChunk, std::min(origin + stop * kChunk, end));
      for (std::int64_t chunk = c; chunk < stop; ++chunk) {
        const std::int64_t at = origin + chunk * kChunk;
        sums_[chunks.begin(g) + chunk] = square_sum(bucket, at, std::min(kChunk, end - at));
      }
    }
  };
  chunks.visit(mine.begin, mine.begin + mine.count, visit);
  comm.signal(kReduced);
  comm.wait_all(kReduced, 1);
}

}  // namespace pycomm::cpu
