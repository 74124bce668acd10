// Compressed all-reduces with ranks as threads, under random delays, against plain arithmetic.
#include <cmath>
#include <cstring>
#include <vector>

#include "support/dice.h"
#include "support/world.h"

namespace pycomm::test {
namespace {

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

// Reduce-scatters with slots that wrap around; others follow at once.
void scattered(int n, bool feeds) {
  World world(n, small_staging(n));
  constexpr int kSteps = 3;
  const std::int64_t block = 16384 + 777, all = block * n;
  for (const Way& way : ways()) {
    if (way.algorithm != Algorithm::two_shot || way.codec.kind == CodecKind::topk) continue;
    std::vector<Step> steps(kSteps, Step(n));
    world.run([&](int r) {
      Dice dice(static_cast<unsigned>(n * 100 + r));
      const auto me = static_cast<std::size_t>(r);
      Tensor residual(static_cast<std::size_t>(all));
      for (int s = 0; s < kSteps; ++s) {
        Step& step = steps[static_cast<std::size_t>(s)];
        for (std::int64_t i = 0; i < all; ++i) step.x[me].push_back(gradient(r, i, s));
        step.before[me] = residual;
        step.result[me].resize(static_cast<std::size_t>(block));
        Operation operation = all_reduce(way, block, feeds);
        operation.collective = Collective::reduce_scatter;
        Feedback feedback;
        feedback.residual = feeds ? residual.data() : nullptr;
        feedback.step = static_cast<std::uint32_t>(s);
        dawdle(dice);
        const bool nonfinite =
            world[r].run(operation, step.x[me].data(), step.result[me].data(), nullptr, feedback);
        PYCOMM_CHECK(!nonfinite, "all is finite");
        step.after[me] = residual;
      }
    });
    for (Step& step : steps) {
      Tensor whole;
      for (const Tensor& part : step.result) whole.insert(whole.end(), part.begin(), part.end());
      for (Tensor& result : step.result) result = whole;
      check_step(step, feeds, allowed(way, n, feeds), std::string(way.name) + " scattered");
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
      {"across the wrap of epochs", [] { compressed(3, true, 0xffffffe0u); }},
      {"mixed with others", [] { mixed(3); }},
  };
#if defined(__SANITIZE_THREAD__)  // which takes two minutes for the others
  const std::vector<int> sizes = {2, 3};
#else
  const std::vector<int> sizes = {1, 2, 3, 4, 5};
#endif
  for (const int n : sizes) {
    tests.push_back({"compressed", [n] { compressed(n, false, 0); }});
    tests.push_back({"compressed with feedback", [n] { compressed(n, true, 0); }});
    tests.push_back({"unused tensors", [n] { unused(n); }});
    tests.push_back({"reduce-scatters", [n] { scattered(n, false); }});
    tests.push_back({"reduce-scatters with feedback", [n] { scattered(n, true); }});
  }
  return run_all(tests);
}
