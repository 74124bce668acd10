// Words in device memory. The host remembers what it has written and writes only changes. They travel as
// kernel parameters, so that no buffer has to outlive the call, even during a graph capture.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace pycomm::cuda {

class DeviceWords {
 public:
  void set(std::vector<std::uint64_t> words) { wanted_ = std::move(words); }
  // Writes the words to `memory`. If it is not the last call's memory, everything is written.
  void upload(void* memory, int device, std::uintptr_t stream);
  void* memory() const { return memory_; }

 private:
  void* memory_ = nullptr;
  std::vector<std::uint64_t> wanted_, written_;
};

}  // namespace pycomm::cuda
