// Writes and reads encoded top-k lists. A list may come from a peer or from storage, so readers check
// that its counts and indices stay within bounds.
#pragma once

#include <stdexcept>
#include <vector>

#include "core/codecs/topk.h"
#include "cpu/codecs/topk_select.h"

namespace pycomm::cpu {

// Encodes the chunks of a region. Entries must be ordered by index, and at most `room`.
class TopkWriter {
 public:
  TopkWriter(const TopkRegion& region, DType values, std::byte* to, std::int64_t room)
      : region_(region), values_(values), to_(to), room_(room) {}

  // Calls sent(entry, value) with each entry's value after encoding.
  template <class Sent>
  void write(const std::vector<Entry>& entries, Sent sent);

 private:
  template <class Sent>
  void write_chunk(const TopkLayout& layout, std::int64_t chunk, const Entry* first,
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

  std::int64_t bytes() const { return layout_.bytes(); }

  // Calls visit(index in chunk, value); throws std::invalid_argument at an index out of order or
  // out of bounds.
  template <class Visit>
  void read(std::int64_t chunk, Visit visit) const;

 private:
  float value(std::int64_t chunk, std::int64_t i) const;

  TopkRegion region_;
  const std::byte* from_;
  std::vector<std::int64_t>
      begins_;  // where each chunk begins, and the end; read once, because a peer may still write
  TopkLayout layout_;
};

template <class T>
T* part_at(std::byte* base, std::int64_t offset) {
  return reinterpret_cast<T*>(base + offset);
}
template <class T>
const T* part_at(const std::byte* base, std::int64_t offset) {
  return reinterpret_cast<const T*>(base + offset);
}

template <class Sent>
void TopkWriter::write(const std::vector<Entry>& entries, Sent sent) {
  const TopkLayout layout{region_.chunks(), static_cast<std::int64_t>(entries.size()), values_};
  PYCOMM_CHECK(layout.bytes() <= room_, "an encoded list must fit its place");
  const Entry* next = entries.data();
  const Entry* const end = next + entries.size();
  for (std::int64_t j = 0; j < layout.chunks; ++j) {
    const Range chunk = region_.chunk(j);
    const Entry* const first = next;
    while (next != end && next->index < chunk.begin + chunk.count) ++next;
    write_chunk(layout, j, first, next, first - entries.data(), sent);
  }
}

template <class Sent>
void TopkWriter::write_chunk(const TopkLayout& layout, std::int64_t chunk, const Entry* first,
                             const Entry* last, std::int64_t at, Sent sent) {
  part_at<std::uint32_t>(to_, 0)[chunk] = static_cast<std::uint32_t>(last - first);
  BlockScale scale{1.0f, 1.0f};
  if (layout.scaled()) {
    std::uint32_t largest = 0;
    for (const Entry* e = first; e != last; ++e) largest = std::max(largest, magnitude(e->value));
    scale = int8_scale(largest);
    part_at<float>(to_, layout.scales())[chunk] = scale.scale;
  }
  auto* const indices = part_at<std::uint16_t>(to_, layout.indices()) + at;
  std::byte* const values = to_ + layout.first_value() + at * size_of(values_);
  for (std::int64_t i = 0; i < last - first; ++i) {
    const Entry& entry = first[i];
    indices[i] = static_cast<std::uint16_t>(entry.index % kTopkChunk);
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
  PYCOMM_CHECK(layout_.bytes() <= bytes, "encoded list is truncated: " + std::to_string(bytes) +
                                             " bytes for " + std::to_string(layout_.chunks) +
                                             " chunks");
  begins_.reserve(static_cast<std::size_t>(layout_.chunks) + 1);
  std::int64_t entries = 0;
  for (std::int64_t j = 0; j < layout_.chunks; ++j) {
    const std::int64_t count = part_at<std::uint32_t>(from_, 0)[j];
    const std::int64_t room = region_.chunk(j).count;
    PYCOMM_CHECK(count <= room, "encoded list has " + std::to_string(count) +
                                    " entries in a chunk of " + std::to_string(room));
    begins_.push_back(entries);
    entries += count;
  }
  begins_.push_back(entries);
  layout_.entries = entries;
  PYCOMM_CHECK(layout_.bytes() <= bytes, "encoded list is truncated: " + std::to_string(bytes) +
                                             " bytes for " + std::to_string(entries) + " entries");
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
  const auto* indices = part_at<std::uint16_t>(from_, layout_.indices());
  const std::int64_t room = region_.chunk(chunk).count;
  std::int64_t before = -1;
  for (std::int64_t i = begins_[static_cast<std::size_t>(chunk)];
       i < begins_[static_cast<std::size_t>(chunk) + 1]; ++i) {
    const std::int64_t index = static_cast<const volatile std::uint16_t*>(indices)[i];
    PYCOMM_CHECK(index > before && index < room, "encoded list has index " + std::to_string(index) +
                                                     " after " + std::to_string(before) +
                                                     " in a chunk of " + std::to_string(room));
    before = index;
    visit(index, value(chunk, i));
  }
}

}  // namespace pycomm::cpu
