// The table of block codecs: one row per kind. The arithmetic of an element is here; the loops over
// blocks are the executors' (cpu/codecs/block_loops.h, cuda/codecs/loops.cuh).
// docs/contributing/extending.md shows how to add one.
#pragma once

#include "core/codecs/codec.h"
#include "core/codecs/int8.h"
#include "core/reduce.h"

namespace pycomm {

// The encoding of one element.
//   kScaled      each block has a scale, made from its largest magnitude(). The scales of all
//                blocks follow the payload, which then has one byte per element.
//   kStochastic  can round stochastically.
struct Int8Elements {
  using Payload = std::int8_t;
  static constexpr bool kScaled = true, kStochastic = true;
  static constexpr Payload kLargest = 127;  // the payload of a block's largest element, or nearly

  PYCOMM_HD static BlockScale scale(std::uint32_t largest) { return int8_scale(largest); }
  PYCOMM_HD static Payload encode(float value, const BlockScale& scale) {
    return int8_quantize(value, scale.inverse);
  }
  PYCOMM_HD static Payload encode(float value, const BlockScale& scale, std::uint32_t random) {
    return int8_quantize(value, scale.inverse, random);
  }
  PYCOMM_HD static float decode(Payload payload, float scale) {
    return int8_dequantize(payload, scale);
  }
};

template <class T>
struct CastElements {
  using Payload = T;
  static constexpr bool kScaled = false, kStochastic = false;

  PYCOMM_HD static Payload encode(float value) { return store<T>(value); }
  PYCOMM_HD static float decode(Payload payload, float) { return load(payload); }
};

// A row. Elements lists the element types that the codec's options choose from; choice() returns
// the index of the chosen one.
struct Int8Codec {
  static constexpr CodecKind kKind = CodecKind::int8;
  using Elements = TypeList<Int8Elements>;
  PYCOMM_HD static int choice(const Codec&) { return 0; }
};

struct CastCodec {
  static constexpr CodecKind kKind = CodecKind::cast;
  using Elements = TypeList<CastElements<float>, CastElements<Half>, CastElements<BFloat16>>;
  PYCOMM_HD static int choice(const Codec& codec) {
    return codec.values == DType::f16 ? 1 : codec.values == DType::bf16 ? 2 : 0;
  }
};

template <class... Rows>
struct CodecTable {
  template <class... More>
  using With = CodecTable<Rows..., More...>;

  // Calls visit(std::type_identity<Elements>{}) with the codec's element type. Returns false if the
  // codec is not in the table.
  template <class Visit>
  PYCOMM_HD static bool visit(const Codec& codec, const Visit& visit) {
    return (
        (Rows::kKind == codec.kind && (Rows::Elements::visit(Rows::choice(codec), visit), true)) ||
        ...);
  }
};

using BlockCodecs = CodecTable<Int8Codec, CastCodec>;

}  // namespace pycomm
