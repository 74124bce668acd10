#include "cpu/codecs/wire.h"

#include <cstring>

#include "core/algorithms/coded.h"
#include "cpu/codecs/loops.h"
#include "cpu/codecs/topk_wire.h"
#include "cpu/executor/loops.h"

namespace pycomm::cpu {
namespace {

void check_aligned(const std::byte* wire) {
  PYCOMM_CHECK(reinterpret_cast<std::uintptr_t>(wire) % 4 == 0, "wire must be aligned to 4 bytes");
}

// An encoding larger than the caches is written around them, so that its lines need not be read first.
// It is made in the first-level cache, kPartElements at a time. (Streamed stores did not make
// decoding faster.)
constexpr std::int64_t kStreamedBytes = 16 << 20;
constexpr std::int64_t kPartElements = kLargestBlock;

// Calls visit(range of elements, address of their encoding); without scales, everything is one tile.
template <class Visit>
void each_tile(const Codec& codec, std::byte* wire, std::int64_t n, Visit visit) {
  std::byte* const body = wire + sizeof(WireHeader);
  if (!is_scaled(codec)) return visit(Range{0, n}, Encoded{body, nullptr});
  const WireTiles layout{n, block_shift(codec)};
  const Tiles tiles{n, kWireTile};
  for (std::int64_t t = 0; t < tiles.count(); ++t) {
    const Range range = tiles[t];
    visit(range, Encoded{body + layout.payload(range.begin),
                         reinterpret_cast<float*>(body + layout.scale(range.begin))});
  }
}

Encoded part_of_tile(const Codec& codec, const Encoded& tile, std::int64_t begin) {
  return {tile.payload + begin * payload_size(codec),
          tile.scales == nullptr ? nullptr : tile.scales + begin / codec.block};
}

// Encodes `whole`, the elements from `begin`, in parts whose elements lie in a row.
bool encode_in_parts(const CodecLoops& loops, const Codec& codec, DType dtype, const Pass& whole,
                     const Places& places, std::int64_t begin, bool stream) {
  alignas(kLine) std::byte made[kPartElements * sizeof(float)];
  const Tiles parts{whole.n, kPartElements};
  bool nonfinite = false;
  for (std::int64_t t = 0; t < parts.count(); ++t) {
    const Range part = parts[t];
    const Encoded to = part_of_tile(codec, whole.to, part.begin);
    Source own = whole.from[0];
    own.encoded.payload += part.begin * size_of(dtype);
    Pass pass = whole;
    pass.from = &own;
    pass.to = {made, to.scales};
    pass.n = part.count;
    pass.first = places[begin + part.begin];
    nonfinite |= loops.encode(pass, codec.block);
    copy({to.payload, stream}, made, part.count * payload_size(codec));
  }
  return nonfinite;
}

bool encode_topk(const Codec& codec, DType dtype, const void* x, std::int64_t n, std::byte* wire) {
  bool finite = true;
  const std::int64_t room = encoded_bytes(codec, n) - sizeof(WireHeader);
  TopkWriter writer({n, 1, 0}, codec.values, wire + sizeof(WireHeader), room);
  writer.write(select(dtype, x, n, codec.k), [&](const Entry&, float sent) {
    finite = finite && magnitude(sent) < kInfinityBits;
  });
  return !finite;
}

template <class T>
bool decode_topk(const TopkReader& reader, const TopkRegion& region, void* output, bool add) {
  bool finite = true;
  T* const to = static_cast<T*>(output);
  for (std::int64_t j = 0; j < region.chunks(); ++j) {
    const Range chunk = region.chunk(j);
    if (!add) std::fill_n(to + chunk.begin, chunk.count, T{});
    reader.read(j, [&](std::int64_t i, float value) {
      T& element = to[chunk.begin + i];
      element = store<T>(add ? load(element) + value : value);
      finite = finite && magnitude(load(store<T>(value))) < kInfinityBits;
    });
  }
  return !finite;
}

}  // namespace

bool encode(const Codec& codec, DType dtype, const void* x, std::int64_t n, std::byte* wire,
            const Random& random, const Places& places) {
  check_aligned(wire);
  std::memset(wire, 0,
              static_cast<std::size_t>(codec.kind == CodecKind::topk ? encoded_bytes(codec, n)
                                                                     : sizeof(WireHeader)));
  const WireHeader header = header_of(codec, n);
  std::memcpy(wire, &header, sizeof(header));
  if (codec.kind == CodecKind::topk) return encode_topk(codec, dtype, x, n, wire);
  const CodecLoops loops = codec_loops(dtype, codec);
  const auto* elements = static_cast<const std::byte*>(x);
  const bool stream = encoded_bytes(codec, n) >= kStreamedBytes;
  bool nonfinite = false;
  each_tile(codec, wire, n, [&](const Range& range, const Encoded& to) {
    const Source own{{const_cast<std::byte*>(elements) + range.begin * size_of(dtype), nullptr},
                     true};
    Pass pass;
    pass.from = &own;
    pass.n_from = 1;
    pass.to = to;
    pass.n = range.count;
    pass.random = random;
    pass.first = places[range.begin];
    nonfinite |= stream || places.run != 0
                     ? encode_in_parts(loops, codec, dtype, pass, places, range.begin, stream)
                     : loops.encode(pass, codec.block);
    if (to.scales != nullptr) {  // no byte is left undefined
      const std::int64_t padding = round_up(range.count, 16) - range.count;
      std::memset(to.payload + range.count, 0, static_cast<std::size_t>(padding));
    }
  });
  if (stream) stream_fence();
  return nonfinite;
}

bool decode(const Codec& codec, const std::byte* wire, std::int64_t bytes, std::int64_t n,
            DType dtype, void* output, bool add) {
  check_aligned(wire);
  WireHeader header;
  if (bytes >= static_cast<std::int64_t>(sizeof(header))) {
    std::memcpy(&header, wire, sizeof(header));
  }
  check_header(codec, header, bytes, n);
  PYCOMM_CHECK(!add || dtype == DType::f32, "out must be float32 if add=True");
  if (codec.kind == CodecKind::topk) {
    const TopkRegion all{n, 1, 0};
    const TopkReader reader(all, codec.values, wire + sizeof(WireHeader),
                            bytes - static_cast<std::int64_t>(sizeof(WireHeader)));
    switch (dtype) {
      case DType::f16:
        return decode_topk<Half>(reader, all, output, add);
      case DType::bf16:
        return decode_topk<BFloat16>(reader, all, output, add);
      default:
        return decode_topk<float>(reader, all, output, add);
    }
  }
  const CodecLoops loops = codec_loops(dtype, codec);
  bool nonfinite = false;
  each_tile(codec, const_cast<std::byte*>(wire), n, [&](const Range& range, const Encoded& from) {
    std::byte* const to = static_cast<std::byte*>(output) + range.begin * size_of(dtype);
    nonfinite |= (add ? loops.decode_and_add : loops.decode)(from, to, range.count, codec.block);
  });
  return nonfinite;
}

std::vector<Entry> select(DType dtype, const void* x, std::int64_t n, std::int64_t k) {
  TopkSelection selection;
  Candidates from;
  from.dtype = dtype;
  from.x = x;
  from.n = n;
  selection.prepare(from, k);
  selection.collect(from);
  return selection.entries();
}

}  // namespace pycomm::cpu
