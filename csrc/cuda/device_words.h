// Words that the host writes into device memory. They travel as kernel parameters, so that no buffer has
// to outlive the call, even during a graph capture.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace pycomm::cuda {

// Writes the words on the stream; the device must be current.
void write_words(std::uint64_t* to, const std::uint64_t* words, std::size_t count,
                 std::uintptr_t stream);

// The host remembers what it has written and writes only changes.
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
