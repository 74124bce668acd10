// The format of encoded elements that leave the shared window, to be stored or sent: a header of 16
// bytes, by which a reader can tell whether it knows what follows. docs/reference/wire-format.md.
#pragma once

#include "core/codecs/topk.h"

namespace pycomm {

inline constexpr std::uint16_t kWireMagic = 0x4350;  // "PC" in memory

// Changes with the format of the codec.
PYCOMM_HD constexpr std::uint8_t wire_version(CodecKind kind) {
  return kind == CodecKind::topk ? 2 : 1;
}

struct WireHeader {
  std::uint16_t magic = kWireMagic;
  std::uint8_t version = 0;
  CodecKind kind = CodecKind::none;
  std::uint32_t parameter = 0;  // block size if there are scales; else the values' DType
  std::int64_t count = 0;       // elements
};
static_assert(sizeof(WireHeader) == 16);

PYCOMM_HD constexpr WireHeader header_of(const Codec& codec, std::int64_t count) {
  WireHeader header;
  header.version = wire_version(codec.kind);
  header.kind = codec.kind;
  header.parameter = is_scaled(codec) ? codec.block : static_cast<std::uint32_t>(codec.values);
  header.count = count;
  return header;
}

// Which elements of a whole tensor are encoded, for random bits: from `first`, all in a row, or in
// runs that begin `stride` apart. Both are in units of kLargestBlock, as is what is encoded at a time.
struct Places {
  std::int64_t first = 0;
  std::uint32_t run = 0;  // 0: all in a row
  std::uint32_t stride = 0;

  // The place of element i, a multiple of kLargestBlock.
  PYCOMM_HD constexpr std::int64_t operator[](std::int64_t i) const {
    if (run == 0) return first + i;
    const auto block = static_cast<std::uint32_t>(i / kLargestBlock);
    return first + (std::int64_t{block / run} * stride + block % run) * kLargestBlock;
  }
};

// Places in units of elements. Throws std::invalid_argument unless runs consist of whole blocks.
inline Places places_of(std::int64_t first, std::int64_t run, std::int64_t stride) {
  PYCOMM_CHECK(run >= 0 && run % kLargestBlock == 0 && stride % kLargestBlock == 0,
               "run and stride must be multiples of " + std::to_string(kLargestBlock) + ", got " +
                   std::to_string(run) + " and " + std::to_string(stride));
  return {first, static_cast<std::uint32_t>(run / kLargestBlock),
          static_cast<std::uint32_t>(stride / kLargestBlock)};
}

// Stored payloads with scales are divided into tiles of this many elements. The last tile is short;
// its payload is padded to a multiple of 16 bytes.
inline constexpr std::int64_t kWireTile = 65536;

// Where n elements with a scale for every 2^shift of them lie: each tile's payload, then its scales.
struct WireTiles {
  std::int64_t n;
  int shift;

  PYCOMM_HD constexpr std::int64_t payload(std::int64_t element) const {
    return element + ((element & -kWireTile) >> shift) * 4;
  }
  // The element must begin a block.
  PYCOMM_HD constexpr std::int64_t scale(std::int64_t element) const {
    const std::int64_t end = (element & -kWireTile) + kWireTile, padded = round_up(n, 16);
    return (end < padded ? end : padded) + (element >> shift) * 4;
  }
  PYCOMM_HD constexpr std::int64_t bytes() const {
    return round_up(n, 16) + ((n + (1 << shift) - 1) >> shift) * 4;
  }
};

// The bytes of n encoded elements with their header. For top-k, the most: fewer selected elements, or
// elements in few of the chunks, take less.
PYCOMM_HD constexpr std::int64_t encoded_bytes(const Codec& codec, std::int64_t n) {
  const std::int64_t header = sizeof(WireHeader);
  if (codec.kind == CodecKind::topk) {
    return header + most_list_bytes(n, codec.k < n ? codec.k : n, codec.values);
  }
  if (!is_scaled(codec)) return header + n * size_of(codec.values);
  return header + WireTiles{n, block_shift(codec)}.bytes();
}

// Throws std::invalid_argument unless a header and a total of `bytes` bytes match an encoding of n
// elements by `codec`.
inline void check_header(const Codec& codec, const WireHeader& found, std::int64_t bytes,
                         std::int64_t n) {
  const auto size = static_cast<std::int64_t>(sizeof(WireHeader));
  PYCOMM_CHECK(bytes >= size, "wire must have a header of 16 bytes, got " + std::to_string(bytes));
  const WireHeader wanted = header_of(codec, n);
  PYCOMM_CHECK(found.magic == wanted.magic, "wire is not a pycomm encoding");
  PYCOMM_CHECK(found.version == wanted.version,
               "wire must have version " + std::to_string(wanted.version) + " of the format, got " +
                   std::to_string(found.version));
  PYCOMM_CHECK(found.kind == wanted.kind && found.parameter == wanted.parameter,
               "wire was made by another codec than " + describe(codec) + ": kind " +
                   std::to_string(static_cast<int>(found.kind)) + ", parameter " +
                   std::to_string(found.parameter));
  PYCOMM_CHECK(found.count == n, "wire holds " + std::to_string(found.count) +
                                     " elements instead of " + std::to_string(n));
  if (codec.kind == CodecKind::topk) return;  // the list's counts determine its length
  PYCOMM_CHECK(bytes == encoded_bytes(codec, n), "wire must have " +
                                                     std::to_string(encoded_bytes(codec, n)) +
                                                     " bytes, got " + std::to_string(bytes));
}

}  // namespace pycomm
