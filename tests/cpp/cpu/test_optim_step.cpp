// Optimizer steps of every rule with every storage. On many threads, in random pieces, they give
// the same bits as on one thread; skipped steps change nothing. All memory has its exact size, for
// AddressSanitizer.
#include <cmath>
#include <limits>

#include "support/optim.h"
#include "support/run_all.h"

namespace pycomm::test {
namespace {

const std::vector<std::int64_t> kCounts = {0, 1, 1024, 255, 0, 4099, 1025};

// Does two steps with clipping and returns the last norm.
double train(const Form& form, std::vector<Parameter>& parameters, const cpu::Parallel& parallel) {
  double norm = 0;
  for (unsigned step = 0; step < 2; ++step) {
    draw_gradients(form, 10 + step, parameters);
    const std::vector<Segment> table = segments(form, parameters);
    float scale = 4.0f, found = 0.0f, clip = 0.0f;
    const StepControl control{&scale, &found, &clip};
    norm = cpu::grad_norm(table, control, 0.5, parallel);
    PYCOMM_CHECK(found == 0.0f && clip > 0.0f && clip < 1.0f, "clipped, not skipped");
    cpu::step(form.settings, table, control, parallel);
  }
  return norm;
}

void threads_change_nothing() {
  Dice dice(0);
  for (const Form& form : forms()) {
    std::vector<Parameter> one = parameters(form, kCounts), many = one;
    const std::vector<Parameter> before = one;
    const double norm = train(form, one, on_one_thread);
    PYCOMM_CHECK(train(form, many, on_threads(dice, 5)) == norm, "norms of " + describe(form));
    PYCOMM_CHECK(one == many, describe(form));
    for (std::size_t p = 0; p < one.size(); ++p) {
      PYCOMM_CHECK(one[p].step == 2.0f, "every counter counts: " + describe(form));
      PYCOMM_CHECK(one[p].count < 9 || one[p].param != before[p].param,
                   "every parameter moves: " + describe(form));
    }
  }
}

// For any non-finite value, in any element of any parameter.
[[maybe_unused]] void skips_touch_nothing() {
  constexpr float inf = std::numeric_limits<float>::infinity();
  Dice dice(0);
  for (const Form& form : forms()) {
    std::vector<Parameter> tensors = parameters(form, kCounts);
    train(form, tensors, on_one_thread);
    for (std::size_t p = 0; p < tensors.size(); ++p) {
      if (tensors[p].count == 0) continue;
      draw_gradients(form, 20, tensors);
      const float bad = dice() % 2 == 0 ? inf : -std::nanf("");
      const std::int64_t where = dice() % tensors[p].count;
      std::vector<Segment> table = segments(form, tensors);
      if (form.grad == Storage::f32) {
        reinterpret_cast<float*>(tensors[p].grad.data())[where] = bad;
      } else {
        cpu::store_chunk({form.grad, Role::weight, tensors[p].grad.data(), nullptr, nullptr}, where,
                         1, &bad, nullptr);
      }
      const std::vector<Parameter> before = tensors;
      float scale = 4.0f, found = 0.0f;
      const StepControl control{&scale, &found, nullptr};
      cpu::grad_norm(table, control, 0.0, on_threads(dice, 3));
      PYCOMM_CHECK(found == 1.0f, "an overflow must be found: " + describe(form));
      for (const float several : {1.0f, 2.0f, inf, std::nanf("")}) {
        found = several;
        cpu::step(form.settings, table, control, on_threads(dice, 3));
        PYCOMM_CHECK(tensors == before, "a skipped step must touch nothing: " + describe(form));
      }
    }
  }
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm::test;
  return run_all({
      {"threads change nothing", threads_change_nothing},
#if !defined(__SANITIZE_THREAD__)  // the same loops by the same threads, for a minute
      {"skips touch nothing", skips_touch_nothing},
#endif
  });
}
