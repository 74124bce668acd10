// Encoding and decoding: valid data is decoded correctly, and no bytes make decoding access memory
// that is not its own (buffers have their exact size, for AddressSanitizer).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "core/codecs/cast.h"
#include "cpu/codecs/topk_wire.h"
#include "cpu/codecs/wire.h"
#include "support/dice.h"
#include "support/run_all.h"

namespace pycomm::test {
namespace {

// Memory of exactly the given size: an access beyond it hits a red zone.
class Exact {
 public:
  explicit Exact(std::int64_t bytes) : bytes_(bytes), data_(new std::byte[room()]) {
    std::memset(data_.get(), 0, room());
  }
  Exact(const Exact& from, std::int64_t bytes) : Exact(bytes) {
    std::memcpy(data(), from.data(), static_cast<std::size_t>(std::min(bytes, from.bytes_)));
  }
  std::byte* data() const { return data_.get(); }
  std::int64_t bytes() const { return bytes_; }

 private:
  std::size_t room() const { return static_cast<std::size_t>(bytes_); }

  std::int64_t bytes_;
  std::unique_ptr<std::byte[]> data_;
};

constexpr DType kFloats[] = {DType::f32, DType::f16, DType::bf16};

float get(const Exact& from, DType dtype, std::int64_t i) {
  if (dtype == DType::f16) return load(cpu::part_at<Half>(from.data(), 0)[i]);
  if (dtype == DType::bf16) return load(cpu::part_at<BFloat16>(from.data(), 0)[i]);
  return cpu::part_at<float>(from.data(), 0)[i];
}

void put(const Exact& to, DType dtype, std::int64_t i, float value) {
  if (dtype == DType::f16) {
    cpu::part_at<Half>(to.data(), 0)[i] = store<Half>(value);
  } else if (dtype == DType::bf16) {
    cpu::part_at<BFloat16>(to.data(), 0)[i] = store<BFloat16>(value);
  } else {
    cpu::part_at<float>(to.data(), 0)[i] = value;
  }
}

// A random codec for n elements.
Codec any_codec(Dice& dice, std::int64_t n) {
  Codec codec;
  codec.kind = static_cast<CodecKind>(1 + roll(dice, 3));
  if (codec.kind == CodecKind::cast) codec.values = kFloats[roll(dice, 3)];
  if (codec.kind == CodecKind::int8) {
    codec.block = 128u << roll(dice, 6);
    codec.stochastic = static_cast<std::uint8_t>(roll(dice, 2));
  }
  if (codec.kind == CodecKind::topk) {
    constexpr DType values[] = {DType::f32, DType::bf16, DType::u8};
    codec.values = values[roll(dice, 3)];
    codec.k = roll(dice, n + 1);
  }
  return codec;
}

// Integers, small enough for every format to represent them; some zeros.
Exact any_tensor(Dice& dice, DType dtype, std::int64_t n) {
  Exact x(n * size_of(dtype));
  for (std::int64_t i = 0; i < n; ++i) {
    put(x, dtype, i, static_cast<float>(roll(dice, 5) == 0 ? 0 : roll(dice, 255) - 127));
  }
  return x;
}

// The largest error of `value` after encoding and decoding. With scales, it is half a scale
// (stochastic: a whole one), and a scale is at most 127 / 127. A 16-bit tensor also rounds
// multiples of the scale.
double tolerance(const Codec& codec, DType dtype, float value) {
  const bool top = codec.kind == CodecKind::topk;
  if (codec.kind != CodecKind::int8 && !(top && codec.values == DType::u8)) return 0;
  const double rounding = dtype == DType::f32 ? 1e-5 : std::fabs(static_cast<double>(value)) / 127;
  return (codec.stochastic != 0 ? 1 : 0.5) + rounding;
}

void check_trip(const Codec& codec, const Exact& x, DType dtype, std::int64_t n,
                const Exact& decoded) {
  std::int64_t sent = 0, nonzero = 0;
  float least_sent = 1e9f, most_left = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const float was = get(x, dtype, i), is = get(decoded, dtype, i);
    nonzero += was != 0 ? 1 : 0;
    if (codec.kind == CodecKind::topk) {
      sent += is != 0 ? 1 : 0;
      (is != 0 ? least_sent : most_left) =
          is != 0 ? std::min(least_sent, std::fabs(was)) : std::max(most_left, std::fabs(was));
      if (is == 0) continue;
    }
    const double off = tolerance(codec, dtype, was);
    PYCOMM_CHECK(std::fabs(static_cast<double>(is) - was) <= off,
                 "element " + std::to_string(i) + " was " + std::to_string(was) + " and is " +
                     std::to_string(is) + ": " + describe(codec));
  }
  if (codec.kind != CodecKind::topk) return;
  PYCOMM_CHECK(sent == std::min<std::int64_t>(codec.k, nonzero) || codec.values == DType::u8,
               std::to_string(sent) + " elements were sent: " + describe(codec));
  PYCOMM_CHECK(least_sent >= most_left || codec.values == DType::u8,
               "not the largest: " + describe(codec));
}

// Damages bytes in one of many ways; the result may still be valid.
void damage(Dice& dice, const Codec& codec, std::int64_t n, std::byte* data, std::int64_t bytes) {
  if (bytes == 0) return;
  const auto words = cpu::part_at<std::uint32_t>(data, 0);
  const std::int64_t header = sizeof(WireHeader);
  const std::int64_t counts = topk_chunks(n) * 4;
  switch (roll(dice, 7)) {
    case 0:  // a few bits
      for (std::int64_t i = roll(dice, 8); i >= 0; --i) {
        data[roll(dice, bytes)] ^= static_cast<std::byte>(1u << roll(dice, 8));
      }
      break;
    case 1:  // a word anywhere
      if (bytes >= 4) words[roll(dice, bytes / 4)] = static_cast<std::uint32_t>(dice());
      break;
    case 2: {  // counts and indices with extreme values
      constexpr std::uint32_t kBad[] = {0xffffffffu, 0x80000000u, 0x7fffffffu, 65536, 65535, 65537};
      const std::int64_t begin = header / 4, most = std::max<std::int64_t>(counts / 4, 1);
      const std::int64_t at = begin + roll(dice, most);
      if ((at + 1) * 4 <= bytes) words[at] = kBad[roll(dice, 6)];
      break;
    }
    case 3: {  // a count that is off by one or belongs to another chunk
      if (codec.kind != CodecKind::topk || header + counts > bytes || counts == 0) break;
      words[header / 4 + roll(dice, counts / 4)] += static_cast<std::uint32_t>(roll(dice, 3)) - 1;
      break;
    }
    case 4:  // a few of the last bits, which are a chunk's indices
      for (std::int64_t i = roll(dice, 4); i >= 0; --i) {
        data[bytes - 1 - roll(dice, std::min<std::int64_t>(bytes, 16))] ^=
            static_cast<std::byte>(1u << roll(dice, 8));
      }
      break;
    case 5:  // the header
      data[roll(dice, std::min(bytes, header))] = static_cast<std::byte>(dice());
      break;
    default:  // everything, with or without the header
      for (std::int64_t i = roll(dice, 2) * header; i < bytes; ++i) {
        data[i] = static_cast<std::byte>(dice());
      }
  }
}

void decode_anything(std::int64_t inputs) {
  Dice dice(1);
  std::int64_t refusals = 0;
  for (std::int64_t done = 0; done < inputs;) {
    const std::int64_t n = roll(dice, 400) == 0 ? 65'000 + roll(dice, 90'000) : roll(dice, 700);
    const DType dtype = kFloats[roll(dice, 3)];
    const Codec codec = any_codec(dice, n);
    const Exact x = any_tensor(dice, dtype, n);
    Exact wire(encoded_bytes(codec, n));
    const Random random{dice(), static_cast<std::uint32_t>(dice()), 0};
    cpu::encode(codec, dtype, x.data(), n, wire.data(), random, {roll(dice, 1000) * kLargestBlock});

    Exact output(n * size_of(dtype));
    Codec reading = codec;
    reading.k = n;
    PYCOMM_CHECK(!cpu::decode(reading, wire.data(), wire.bytes(), n, dtype, output.data(), false),
                 "all that is encoded is finite");
    check_trip(codec, x, dtype, n, output);

    for (int turn = 0; turn < 25; ++turn, ++done) {
      const std::int64_t off = roll(dice, 4) == 0 ? roll(dice, wire.bytes() + 40) : wire.bytes();
      Exact bad(wire, off);
      for (std::int64_t times = roll(dice, 3); times >= 0; --times) {
        damage(dice, codec, n, bad.data(), bad.bytes());
      }
      const bool add = dtype == DType::f32 && roll(dice, 2) == 0;
      refusals += refused(
          [&] { cpu::decode(reading, bad.data(), bad.bytes(), n, dtype, output.data(), add); });
    }
  }
  PYCOMM_CHECK(refusals > inputs / 10 && refusals < inputs,
               std::to_string(refusals) + " of " + std::to_string(inputs) + " were refused");
}

// Every wrong value of each header byte.
void wrong_headers() {
  Dice dice(2);
  const std::int64_t n = 300;
  Codec codec;
  codec.kind = CodecKind::int8;
  codec.block = 256;
  const Exact x = any_tensor(dice, DType::f32, n), output(n * 4);
  Exact wire(encoded_bytes(codec, n));
  cpu::encode(codec, DType::f32, x.data(), n, wire.data(), {}, {});
  for (std::size_t at = 0; at < sizeof(WireHeader); ++at) {
    for (unsigned flip = 1; flip < 256; ++flip) {
      Exact bad(wire, wire.bytes());
      bad.data()[at] ^= static_cast<std::byte>(flip);
      PYCOMM_CHECK(refused([&] {
                     cpu::decode(codec, bad.data(), bad.bytes(), n, DType::f32, output.data(),
                                 false);
                   }),
                   "byte " + std::to_string(at) + " of the header was not looked at");
    }
  }
}

// Lists as peers write them: of one region, without a header.
void read_anything(std::int64_t inputs) {
  Dice dice(3);
  std::int64_t refusals = 0;
  for (std::int64_t done = 0; done < inputs;) {
    const int ranks = static_cast<int>(1 + roll(dice, 4));
    const std::int64_t n = roll(dice, 10) == 0 ? roll(dice, 6 * kTopkChunk) : roll(dice, 2000);
    const TopkRegion region{n, ranks, static_cast<int>(roll(dice, ranks))};
    constexpr DType kValues[] = {DType::f32, DType::bf16, DType::f16, DType::u8};
    const DType values = kValues[roll(dice, 4)];
    std::vector<cpu::Entry> entries;
    for (std::int64_t j = 0; j < region.chunks(); ++j) {
      const Range chunk = region.chunk(j);
      for (std::int64_t i = 0; i < chunk.count; i += 1 + roll(dice, chunk.count / 20 + 2)) {
        const auto index = static_cast<std::uint32_t>(chunk.begin + i);
        entries.push_back({index, static_cast<float>(roll(dice, 50) + 1)});
      }
    }
    const auto size = static_cast<std::int64_t>(entries.size());
    Exact list(most_list_bytes(region.elements(), size, values));
    cpu::TopkWriter(region, values, list.data(), list.bytes())
        .write(entries, [](const cpu::Entry&, float) {});

    const auto read_all = [&](const Exact& from, bool scribble, bool whole) {
      const cpu::TopkReader reader(region, values, from.data(), from.bytes());
      if (scribble) {  // a peer that writes at a forbidden time
        for (std::int64_t i = 0; i < from.bytes(); ++i) {
          from.data()[i] = static_cast<std::byte>(dice());
        }
      }
      auto next = entries.begin();
      for (std::int64_t j = 0; j < region.chunks(); ++j) {
        const Range chunk = region.chunk(j);
        Exact sums(chunk.count * 4);
        reader.read(j, [&](std::int64_t i, float value) {
          put(sums, DType::f32, i, value);
          if (!whole) return;
          PYCOMM_CHECK(next->index == chunk.begin + i, "a wrong index");
          // With a scale: half a step of at most 50 / 127.
          PYCOMM_CHECK(std::fabs(value - next->value) <= (values == DType::u8 ? 0.2f : 0.0f),
                       "a wrong value");
          ++next;
        });
      }
      PYCOMM_CHECK(!whole || next == entries.end(), "an entry is missing");
    };
    PYCOMM_CHECK(!refused([&] { read_all(list, false, true); }), "a valid list was refused");
    for (int turn = 0; turn < 20; ++turn, ++done) {
      const std::int64_t off = roll(dice, 4) == 0 ? roll(dice, list.bytes() + 9) : list.bytes();
      Exact bad(list, off);
      if (roll(dice, 4) != 0) {
        const auto words = cpu::part_at<std::uint32_t>(bad.data(), 0);
        const std::int64_t most = std::min(bad.bytes() / 4, region.chunks());
        const std::int64_t bits = std::min<std::int64_t>(roll(dice, 24), most * 8);
        for (std::int64_t i = 0; i < bits; ++i) words[roll(dice, most)] ^= 1u << roll(dice, 32);
        for (std::int64_t i = 0; i < 4 && bad.bytes() > 0; ++i) {
          bad.data()[roll(dice, bad.bytes())] = static_cast<std::byte>(dice());
        }
      }
      refusals += refused([&] { read_all(bad, roll(dice, 3) == 0, false); });
    }
  }
  PYCOMM_CHECK(refusals > inputs / 10 && refusals < inputs,
               std::to_string(refusals) + " of " + std::to_string(inputs) + " were refused");
}

// However entries are spread over chunks, their indices fit into the words that are reserved for them;
// with one chunk, exactly. Fewer entries need no more.
void indices_fit() {
  Dice dice(7);
  for (int turn = 0; turn < 20'000; ++turn) {
    const std::int64_t n = 1 + roll(dice, 4 * kTopkChunk), chunks = topk_chunks(n);
    const Tiles tiles{n, kTopkChunk};
    std::int64_t entries = 0, words = 0;
    for (std::int64_t j = 0; j < chunks; ++j) {
      const std::int64_t most = tiles[j].count >> roll(dice, 17);
      const std::int64_t count = roll(dice, 3) == 0 ? 0 : roll(dice, most + 1);
      entries += count;
      words += TopkIndices{count, tiles[j].count}.words();
    }
    const std::int64_t reserved = TopkIndices::most_words(entries, n, chunks);
    const std::string what = std::to_string(entries) + " of " + std::to_string(n);
    PYCOMM_CHECK(words <= reserved && (chunks > 1 || words == reserved), what);
    if (entries < n) {
      PYCOMM_CHECK(reserved <= TopkIndices::most_words(entries + 1, n, chunks), what);
    }
    PYCOMM_CHECK(reserved <= chunks * kMostIndexWords, what);
  }
}

// The same for tensors of up to 2^32 elements, with entries spread evenly over some of the chunks.
void indices_of_large_tensors_fit() {
  Dice dice(8);
  for (int turn = 0; turn < 20'000; ++turn) {
    const std::int64_t chunks = std::int64_t{1} << (1 + roll(dice, 16)), n = chunks * kTopkChunk;
    const std::int64_t entries = 1 + roll(dice, roll(dice, 2) == 0 ? chunks : n / 4);
    const std::int64_t used = std::min(1 + roll(dice, chunks), entries), each = entries / used;
    if (each >= kTopkChunk) continue;
    const std::int64_t more = entries % used;  // chunks with one entry more
    const std::int64_t words = more * TopkIndices{each + 1, kTopkChunk}.words() +
                               (used - more) * TopkIndices{each, kTopkChunk}.words();
    const std::string what = std::to_string(entries) + " of " + std::to_string(n);
    PYCOMM_CHECK(words <= TopkIndices::most_words(entries, n, chunks), what);
    PYCOMM_CHECK(TopkIndices::most_words(entries, n, chunks) <=
                     TopkIndices::most_words(entries + 1, n, chunks),
                 what);
  }
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm::test;
  return run_all({
      {"decode anything", [] { decode_anything(100'000); }},
      {"every wrong header", wrong_headers},
      {"read any list", [] { read_anything(30'000); }},
      {"indices fit", indices_fit},
      {"indices of large tensors fit", indices_of_large_tensors_fit},
  });
}
