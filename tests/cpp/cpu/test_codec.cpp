// Encoding and decoding: valid data is decoded correctly, and no bytes make decoding access memory
// that is not its own (buffers have their exact size, for AddressSanitizer). Also compressed
// all-reduces with ranks as threads, under random delays, against plain arithmetic.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "core/codecs/cast.h"
#include "cpu/codecs/topk_wire.h"
#include "cpu/codecs/wire.h"
#include "support/world.h"

namespace pycomm::test {
namespace {

using Dice = std::mt19937;

std::int64_t roll(Dice& dice, std::int64_t sides) {
  return static_cast<std::int64_t>(dice() % static_cast<std::uint64_t>(sides));
}

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
    case 4: {  // two neighbouring indices in the wrong order
      if (bytes < header + counts + 8) break;
      const auto shorts = cpu::part_at<std::uint16_t>(data, 0);
      const std::int64_t at = (header + counts) / 2;
      const std::int64_t i = at + roll(dice, bytes / 2 - at - 1);
      std::swap(shorts[i], shorts[i + 1]);
      break;
    }
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
    cpu::encode(codec, dtype, x.data(), n, wire.data(), random, roll(dice, 1000) * kLargestBlock);

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
  cpu::encode(codec, DType::f32, x.data(), n, wire.data(), {}, 0);
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
    const TopkLayout layout{region.chunks(), size, values};
    Exact list(layout.bytes());
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

// Compressed all-reduces.

struct Way {
  const char* name;
  Algorithm algorithm;
  Codec codec;
};

std::vector<Way> ways() {
  Codec int8, random, bf16, f32, topk, small;
  int8.kind = random.kind = CodecKind::int8;
  int8.block = 256;
  random.block = 1024;
  random.stochastic = 1;
  bf16.kind = f32.kind = CodecKind::cast;
  bf16.values = DType::bf16;
  topk.kind = small.kind = CodecKind::topk;
  small.values = DType::u8;
  std::vector<Way> all;
  for (const auto algorithm : {Algorithm::two_shot, Algorithm::ring, Algorithm::tree}) {
    all.push_back({"int8", algorithm, int8});
    all.push_back({"int8, stochastic", algorithm, random});
    all.push_back({"bf16", algorithm, bf16});
    all.push_back({"identity", algorithm, f32});
  }
  all.push_back({"top-k", Algorithm::two_shot, topk});
  all.push_back({"top-k of int8", Algorithm::automatic, small});
  return all;
}

float gradient(int rank, std::int64_t i, int round) {
  return static_cast<float>((i * 7 + rank * 31 + round * 13) % 101 - 50);
}

void dawdle(Dice& dice) {
  for (std::int64_t i = roll(dice, 4); i > 0; --i) std::this_thread::yield();
}

using Tensor = std::vector<float>;

// The tensors of all ranks after a step.
struct Step {
  explicit Step(int n) {
    for (auto* part : {&before, &x, &after, &result}) part->resize(static_cast<std::size_t>(n));
  }
  std::vector<Tensor> before, x, after, result;
  float scale = 1;  // of x
};

// Nothing is lost: the sum of gradients and residuals before equals the sum of result and residuals
// after.
void check_step(const Step& step, bool feeds, double allowed, const std::string& where) {
  const std::size_t n = step.x.size();
  for (std::size_t i = 0; i < step.x[0].size(); ++i) {
    double in = 0, kept = 0;
    for (std::size_t r = 0; r < n; ++r) {
      PYCOMM_CHECK(std::memcmp(&step.result[r][i], &step.result[0][i], 4) == 0,
                   "ranks differ at element " + std::to_string(i) + ": " + where);
      in += static_cast<double>(step.x[r][i]);
      if (!feeds) continue;
      in += static_cast<double>(step.before[r][i] * step.scale);
      kept += static_cast<double>(step.after[r][i] * step.scale);
    }
    const double out = static_cast<double>(step.result[0][i]) + kept;
    PYCOMM_CHECK(std::fabs(in - out) <= allowed, "element " + std::to_string(i) + " is " +
                                                     std::to_string(out) + " instead of " +
                                                     std::to_string(in) + ": " + where);
  }
}

Operation all_reduce(const Way& way, std::int64_t count, bool feeds) {
  Operation operation{Collective::all_reduce, way.algorithm, DType::f32, ReduceOp::sum, 0, count};
  operation.codec = way.codec;
  operation.codec.feedback = feeds ? 1 : 0;
  if (way.codec.kind == CodecKind::topk) operation.codec.k = ceil_div(count, 20);
  return operation;
}

// Little staging, so that slots wrap around many times.
std::int64_t small_staging(int n) { return 2 * kStagingSlots * (n + 1) * kLargestBlock * 5; }

// The largest error. Without feedback and with int8, |sum| <= 50 n is encoded at most n times.
double allowed(const Way& way, int n, bool feeds) {
  if (feeds) return 1e-2;
  if (way.codec.kind == CodecKind::cast) return 1e-9;
  if (way.codec.kind == CodecKind::topk) return 50.0 * n;  // unsent elements are lost
  return 50.0 * n / 127 * (way.codec.stochastic != 0 ? 1 : 0.5) * (n + 1);
}

void compressed(int n, bool feeds, std::uint32_t first_epoch) {
  World world(n, small_staging(n), first_epoch);
  const std::vector<Way> all = ways();
  int round = 0;
  for (const std::int64_t count : {0, 1, 4099, 3 * 16384 * n + 777}) {
    for (const Way& way : all) {
      constexpr int kSteps = 2;
      std::vector<Step> steps(kSteps, Step(n));
      for (Step& step : steps) step.scale = static_cast<float>(1 + round % 3);
      world.run([&](int r) {
        Dice dice(static_cast<unsigned>(n * 1000 + round * 10 + r));
        Tensor residual(static_cast<std::size_t>(count)), was = residual;
        for (int s = 0; s < kSteps; ++s) {
          const auto me = static_cast<std::size_t>(r);
          Step& step = steps[static_cast<std::size_t>(s)];
          Tensor& x = step.x[me];
          for (std::int64_t i = 0; i < count; ++i) x.push_back(gradient(r, i, round + s));
          step.before[me] = residual;
          Tensor output = x;  // in place
          Operation operation = all_reduce(way, count, feeds);
          // Another rank owns the first chunk.
          operation.offset = static_cast<std::uint32_t>(kTopkChunk / kSmallestBlock * round);
          Feedback feedback;
          feedback.residual = feeds ? residual.data() : nullptr;
          feedback.residual_before = feeds ? was.data() : nullptr;
          feedback.scale = &step.scale;
          feedback.step = static_cast<std::uint32_t>(s);
          dawdle(dice);
          bool nonfinite = false;
          if (s % 2 == 0) {
            nonfinite = world[r].run(operation, output.data(), output.data(), nullptr, feedback);
          } else {
            const auto work = world[r].submit(operation, output.data(), output.data(), feedback);
            PYCOMM_CHECK(work->wait(std::chrono::seconds(60)), "a work must complete");
            nonfinite = work->nonfinite();
          }
          PYCOMM_CHECK(!nonfinite, "all is finite");
          PYCOMM_CHECK(!feeds || was == step.before[me], "a residual must be kept as it was");
          step.after[me] = residual;
          step.result[me] = output;
        }
      });
      round += kSteps;
      for (int s = 0; s < kSteps; ++s) {
        check_step(steps[static_cast<std::size_t>(s)], feeds, allowed(way, n, feeds),
                   std::string(way.name) + ", " + name_of(way.algorithm) + ", " +
                       std::to_string(count) + " elements, step " + std::to_string(s));
      }
    }
  }
}

// A tensor that is zero on some ranks is like any other. If it is zero on all ranks, it leaves
// residuals unchanged.
void unused(int n) {
  World world(n, small_staging(n));
  constexpr std::int64_t kCount = 5000;
  for (const Way& way : ways()) {
    for (const int users : {0, 1}) {
      Step step(n);
      world.run([&](int r) {
        const auto me = static_cast<std::size_t>(r);
        Tensor residual, velocity(kCount, 0.5f), velocity_was(kCount), output(kCount);
        for (std::int64_t i = 0; i < kCount; ++i) residual.push_back(gradient(r, i, 0));
        if (r < users) output[77] = 3;
        step.x[me] = output;
        step.before[me] = residual;
        Feedback feedback;
        feedback.residual = residual.data();
        feedback.hold_unused = true;
        if (way.codec.kind == CodecKind::topk && users == 0) {
          feedback.velocity = velocity.data();
          feedback.velocity_before = velocity_was.data();
        }
        world[r].run(all_reduce(way, kCount, true), output.data(), output.data(), nullptr,
                     feedback);
        PYCOMM_CHECK(velocity == Tensor(kCount, 0.5f), "an unused velocity must stay");
        PYCOMM_CHECK(feedback.velocity_before == nullptr || velocity_was == velocity,
                     "a velocity must be kept as it was");
        step.after[me] = residual;
        step.result[me] = output;
      });
      check_step(step, true, 1e-2, way.name);
      const bool held = step.after == step.before;
      const bool sent = step.result[0] != Tensor(kCount);
      PYCOMM_CHECK(held == (users == 0) && sent == (users > 0),
                   std::string(way.name) + " of " + std::to_string(users) + " users");
    }
  }
}

// Different codecs, dense operations and asynchronous ones back to back: slots, lists and areas of
// one operation do not disturb the next.
void mixed(int n) {
  World world(n, small_staging(n));
  const std::vector<Way> all = ways();
  world.run([&](int r) {
    Dice dice(static_cast<unsigned>(r));
    constexpr int kWorks = 60;
    constexpr std::int64_t kCount = 3000;
    std::vector<Tensor> tensors(kWorks, Tensor(kCount, 2.0f));
    std::vector<std::shared_ptr<cpu::Work>> works;
    for (int k = 0; k < kWorks; ++k) {
      float* const x = tensors[static_cast<std::size_t>(k)].data();
      Operation operation{
          Collective::all_reduce, Algorithm::ring, DType::f32, ReduceOp::avg, 0, kCount};
      if (k % 5 != 0) {
        const Way& way = all[static_cast<std::size_t>(k) % all.size()];
        operation.algorithm = way.algorithm;
        operation.codec = way.codec;
        operation.codec.k = way.codec.kind == CodecKind::topk ? kCount : 0;
      }
      dawdle(dice);
      if (k % 3 == 0) {
        world[r].run(operation, x, x);
      } else {
        works.push_back(world[r].submit(operation, x, x));
      }
    }
    for (const auto& work : works) {
      PYCOMM_CHECK(work->wait(std::chrono::seconds(60)), "a work must complete");
    }
    for (const Tensor& tensor : tensors) {
      for (const float got : tensor) {
        PYCOMM_CHECK(std::fabs(got - 2) < 0.05f, "an element is " + std::to_string(got));
      }
    }
  });
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm::test;
  std::vector<std::pair<const char*, std::function<void()>>> tests = {
      {"decode anything", [] { decode_anything(100'000); }},
      {"every wrong header", wrong_headers},
      {"read any list", [] { read_anything(30'000); }},
      {"compressed across the wrap of epochs", [] { compressed(3, true, 0xffffffe0u); }},
      {"mixed with others", [] { mixed(3); }},
  };
  for (int n = 1; n <= 5; ++n) {
    tests.push_back({"compressed", [n] { compressed(n, false, 0); }});
    tests.push_back({"compressed with feedback", [n] { compressed(n, true, 0); }});
    tests.push_back({"unused tensors", [n] { unused(n); }});
  }
  return run_all(tests);
}
