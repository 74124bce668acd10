#include "cuda/device_words.h"

#include <algorithm>

#include "core/layout.h"
#include "cuda/runtime.cuh"

namespace pycomm::cuda {
namespace {

constexpr std::size_t kWordsAtOnce = 1000;

// Words that one launch writes; they travel as kernel parameters.
struct Patch {
  std::uint64_t* to;
  std::int64_t count;
  std::uint64_t words[kWordsAtOnce];
};
static_assert(sizeof(Patch) <= 8 << 10);

__global__ void __launch_bounds__(kThreads) patch_kernel(const __grid_constant__ Patch patch) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < patch.count) patch.to[i] = patch.words[i];
}

}  // namespace

void write_words(std::uint64_t* to, const std::uint64_t* words, std::size_t count,
                 std::uintptr_t stream) {
  Patch patch;
  for (std::size_t at = 0; at < count; at += kWordsAtOnce) {
    patch.to = to + at;
    patch.count = static_cast<std::int64_t>(std::min(count - at, kWordsAtOnce));
    std::copy_n(words + at, patch.count, patch.words);
    launch_blocks<&patch_kernel>(ceil_div(patch.count, kThreads), patch,
                                 reinterpret_cast<cudaStream_t>(stream));
  }
}

void DeviceWords::upload(void* memory, int device, std::uintptr_t stream) {
  // Forget the old content first: a launch may throw.
  const std::vector<std::uint64_t> before =
      memory == memory_ ? std::move(written_) : std::vector<std::uint64_t>();
  written_.clear();
  memory_ = memory;
  const auto differs = [&](std::size_t i) { return i >= before.size() || before[i] != wanted_[i]; };
  const DeviceGuard guard(device);
  for (std::size_t at = 0; at < wanted_.size();) {
    if (!differs(at)) {
      ++at;
      continue;
    }
    std::size_t end = std::min(wanted_.size(), at + kWordsAtOnce);
    while (!differs(end - 1)) --end;
    write_words(static_cast<std::uint64_t*>(memory) + at, wanted_.data() + at, end - at, stream);
    at = end;
  }
  written_ = wanted_;
}

}  // namespace pycomm::cuda
