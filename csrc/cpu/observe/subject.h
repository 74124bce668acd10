// What a rank's operations are about, in words, such as the parameters of a bucket: a ring of texts
// in its slice of the window, to which records refer by number. Only its rank writes it, and only
// texts that are not there. Other ranks and other processes may read it at any time, also when its
// rank hangs or has died.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "core/layout.h"
#include "cpu/observe/record.h"

namespace pycomm::cpu {

class alignas(2 * kLine) Subject {
 public:
  static constexpr std::size_t kBytes = 120;  // of a text; what is longer is cut

  // As in Record, every store is a release, so that no reader takes a part of a text for the whole.
  void write(std::uint32_t number, std::string_view text) {
    number_.store(0, std::memory_order_relaxed);
    std::array<char, kBytes> bytes{};
    text.copy(bytes.data(), kBytes);
    const auto words = std::bit_cast<Words>(bytes);
    for (std::size_t i = 0; i < words.size(); ++i) {
      words_[i].store(words[i], std::memory_order_release);
    }
    number_.store(number, std::memory_order_release);
  }

  // The text with this number; empty if another one has taken its place.
  std::string read(std::uint32_t number) const {
    const bool found = number_.load(std::memory_order_acquire) == number;
    Words words;
    for (std::size_t i = 0; i < words.size(); ++i) {
      words[i] = words_[i].load(std::memory_order_acquire);
    }
    if (!found || number_.load(std::memory_order_relaxed) != number) return {};
    const auto bytes = std::bit_cast<std::array<char, kBytes>>(words);
    std::string text(bytes.data(), strnlen(bytes.data(), kBytes));
    for (char& c : text) c = c >= ' ' && c <= '~' ? c : '?';  // it may come from another process
    return text;
  }

 private:
  using Words = std::array<std::uint64_t, kBytes / sizeof(std::uint64_t)>;

  std::atomic<std::uint64_t> number_;
  std::atomic<std::uint64_t> words_[std::tuple_size_v<Words>];
};

// The number of subjects in a ring: more buckets than most models have.
inline constexpr std::uint32_t kSubjects = 256;
static_assert(kSubjects >= 2 * kRecords);

}  // namespace pycomm::cpu
