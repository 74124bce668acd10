// Writes and reads encoded top-k lists. A list may come from a peer or from storage, so readers check
// that its counts and indices stay within bounds.
#pragma once

#include <cstring>
#include <stdexcept>
#include <vector>

#include "core/codecs/topk.h"
#include "cpu/codecs/topk_select.h"

namespace pycomm::cpu {

// Encodes the chunks of a region into at most `room` bytes. Entries must be ordered by index.
class TopkWriter {
 public:
  TopkWriter(const TopkRegion& region, DType values, std::byte* to, std::int64_t room)
      : region_(region), values_(values), to_(to), room_(room) {}

  // Calls sent(entry, value) with each entry's value after encoding.
  template <class Sent>
  void write(const std::vector<Entry>& entries, Sent sent);

 private:
  template <class Sent>
  void write_values(const TopkLayout& layout, std::int64_t chunk, const Entry* first,
                    const Entry* last, std::int64_t at, Sent sent);

  TopkRegion region_;
  DType values_;
  std::byte* to_;
  std::int64_t room_;
};

// Checks the counts of an encoded list, then reads it chunk by chunk.
class TopkReader {
 public:
  // Throws std::invalid_argument unless the list fits into `bytes`.
  TopkReader(const TopkRegion& region, DType values, const std::byte* from, std::int64_t bytes);

  std::int64_t bytes() const { return bytes_; }

  // Calls visit(index in chunk, value); throws std::invalid_argument unless the chunk's indices are in
  // order, within bounds and as many as its count.
  template <class Visit>
  void read(std::int64_t chunk, Visit visit) const;

 private:
  float value(std::int64_t chunk, std::int64_t i) const;

  TopkRegion region_;
  const std::byte* from_;
  // Where each chunk's entries and words begin, and the end. Counts are read once, because a peer may
  // still write.
  std::vector<std::int64_t> begins_, words_;
  TopkLayout layout_;
  std::int64_t bytes_ = 0;
};

template <class T>
T* part_at(std::byte* base, std::int64_t offset) {
  return reinterpret_cast<T*>(base + offset);
}
template <class T>
const T* part_at(const std::byte* base, std::int64_t offset) {
  return reinterpret_cast<const T*>(base + offset);
}

// Writes the indices of a chunk's entries; returns the end of their words.
inline std::uint32_t* write_indices(const TopkIndices& indices, const Entry* first,
                                    std::uint32_t* words) {
  const TopkIndexWriter writer(indices);
  std::fill_n(words, indices.words(), 0u);
  for (std::int64_t i = 0; i < indices.entries; ++i) {
    writer.write(i, static_cast<std::uint32_t>(first[i].index % kTopkChunk),
                 [&](std::int64_t word, std::uint32_t bits) { words[word] |= bits; });
  }
  return words + indices.words();
}

template <class Sent>
void TopkWriter::write(const std::vector<Entry>& entries, Sent sent) {
  const auto count = static_cast<std::int64_t>(entries.size());
  const TopkLayout layout{region_.chunks(), count, values_};
  PYCOMM_CHECK(most_list_bytes(region_.elements(), count, values_) <= room_,
               "an encoded list is longer than its place");
  auto* words = part_at<std::uint32_t>(to_, layout.indices());
  const Entry* next = entries.data();
  const Entry* const end = next + count;
  for (std::int64_t j = 0; j < layout.chunks; ++j) {
    const Range chunk = region_.chunk(j);
    const Entry* const first = next;
    while (next != end && next->index < chunk.begin + chunk.count) ++next;
    part_at<std::uint32_t>(to_, 0)[j] = static_cast<std::uint32_t>(next - first);
    write_values(layout, j, first, next, first - entries.data(), sent);
    words = write_indices({next - first, chunk.count}, first, words);
  }
}

template <class Sent>
void TopkWriter::write_values(const TopkLayout& layout, std::int64_t chunk, const Entry* first,
                              const Entry* last, std::int64_t at, Sent sent) {
  BlockScale scale{1.0f, 1.0f};
  if (layout.scaled()) {
    std::uint32_t largest = 0;
    for (const Entry* e = first; e != last; ++e) largest = std::max(largest, magnitude(e->value));
    scale = int8_scale(largest);
    part_at<float>(to_, layout.scales())[chunk] = scale.scale;
  }
  std::byte* const values = to_ + layout.first_value() + at * size_of(values_);
  for (std::int64_t i = 0; i < last - first; ++i) {
    const Entry& entry = first[i];
    switch (values_) {
      case DType::f16:
        part_at<Half>(values, 0)[i] = store<Half>(entry.value);
        break;
      case DType::bf16:
        part_at<BFloat16>(values, 0)[i] = store<BFloat16>(entry.value);
        break;
      case DType::u8:
        part_at<std::int8_t>(values, 0)[i] =
            scale.finite() ? int8_quantize(entry.value, scale.inverse) : std::int8_t{0};
        break;
      default:
        part_at<float>(values, 0)[i] = store<float>(entry.value);
    }
    sent(entry, through_wire(entry.value, values_, scale));
  }
}

inline TopkReader::TopkReader(const TopkRegion& region, DType values, const std::byte* from,
                              std::int64_t bytes)
    : region_(region), from_(from), layout_{region.chunks(), 0, values} {
  const auto check_length = [&](std::int64_t needed, std::int64_t number, const char* what) {
    PYCOMM_CHECK(needed <= bytes, "encoded list is truncated: " + std::to_string(bytes) +
                                      " bytes for " + std::to_string(number) + what);
  };
  check_length(layout_.indices(), layout_.chunks, " chunks");
  begins_.reserve(static_cast<std::size_t>(layout_.chunks) + 1);
  words_.reserve(static_cast<std::size_t>(layout_.chunks) + 1);
  std::int64_t entries = 0, words = 0;
  for (std::int64_t j = 0; j < layout_.chunks; ++j) {
    const std::int64_t count = part_at<std::uint32_t>(from_, 0)[j];
    const std::int64_t room = region_.chunk(j).count;
    PYCOMM_CHECK(count <= room, "encoded list has " + std::to_string(count) +
                                    " entries in a chunk of " + std::to_string(room));
    begins_.push_back(entries);
    words_.push_back(words);
    entries += count;
    words += TopkIndices{count, room}.words();
  }
  begins_.push_back(entries);
  layout_.entries = entries;
  bytes_ = layout_.indices() + words * 4;
  check_length(bytes_, entries, " entries");
}

inline float TopkReader::value(std::int64_t chunk, std::int64_t i) const {
  const std::byte* values = from_ + layout_.first_value();
  switch (layout_.values) {
    case DType::f16:
      return load(part_at<Half>(values, 0)[i]);
    case DType::bf16:
      return load(part_at<BFloat16>(values, 0)[i]);
    case DType::u8:
      return int8_dequantize(part_at<std::int8_t>(values, 0)[i],
                             part_at<float>(from_, layout_.scales())[chunk]);
    default:
      return part_at<float>(values, 0)[i];
  }
}

template <class Visit>
void TopkReader::read(std::int64_t chunk, Visit visit) const {
  const std::int64_t first = begins_[static_cast<std::size_t>(chunk)];
  const TopkIndices indices{begins_[static_cast<std::size_t>(chunk) + 1] - first,
                            region_.chunk(chunk).count};
  std::uint32_t words[kMostIndexWords];
  std::memcpy(words, from_ + layout_.indices() + words_[static_cast<std::size_t>(chunk)] * 4,
              static_cast<std::size_t>(indices.words()) * 4);
  const TopkIndexReader reader(indices, words);
  std::int64_t i = 0;
  bool valid = true;
  for (std::int64_t word = reader.begin(); valid && word < reader.end(); ++word) {
    valid = reader.read(word, i, [&](std::int64_t entry, std::int64_t index) {
      visit(index, value(chunk, first + entry));
      i = entry + 1;
    });
  }
  PYCOMM_CHECK(valid && i == indices.entries,
               "encoded list has a wrong index after " + std::to_string(i) + " of " +
                   std::to_string(indices.entries) + " entries in a chunk of " +
                   std::to_string(indices.elements));
}

}  // namespace pycomm::cpu
