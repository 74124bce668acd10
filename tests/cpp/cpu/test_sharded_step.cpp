// Sharded steps of every rule with every storage, with ranks as threads. They give the bits of a step
// of the whole model on averaged gradients, whatever the shards are.
#include <cstring>
#include <limits>

#include "cpu/optim/sharded_step.h"
#include "support/dice.h"
#include "support/run_all.h"
#include "support/sharded_model.h"

namespace pycomm::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const std::vector<std::int64_t> kCounts = {0, 1, 1024, 9219, 255, 0, 2048, 4099};

bool same_bits(double a, double b) { return std::memcmp(&a, &b, sizeof(a)) == 0; }

// Takes one step of both models. With several threads, each rank's pieces begin anywhere.
void step_and_compare(World& world, ShardedModel& model, int threads, const std::string& what) {
  const double norm = model.step_whole(on_one_thread);
  world.run([&](int r) {
    Dice dice(static_cast<unsigned>(r));
    cpu::ShardedStep step =
        model.step(r, threads > 1 ? on_threads(dice, threads) : cpu::Parallel(on_one_thread));
    world[r].run(cpu::sharded_call(step, what));
    PYCOMM_CHECK(same_bits(step.norm, norm), "norm: " + what);
    PYCOMM_CHECK(!step.half_done, "a step that succeeds is not half done: " + what);
  });
  model.check(what);
}

// Every combination of what a step measures and finds averaged is met by some of the forms.
Plan plan_of(const Form& form, int ranks, std::size_t choice) {
  return {form,
          ranks,
          kCounts,
          (choice & 1) != 0,
          (choice & 2) != 0,
          (choice & 4) != 0,
          (choice & 8) != 0,
          (choice & 16) != 0};
}

// The numbers of ranks from 1 to 5 cover all forms. ThreadSanitizer, to which forms are alike, sees a
// seventh of them.
#if defined(__SANITIZE_THREAD__)
constexpr std::size_t kEvery = 35;
#else
constexpr std::size_t kEvery = 5;
#endif

void shards_change_nothing(int ranks) {
  World world(ranks);
  const std::vector<Form> all = forms();
  for (std::size_t f = 0; f < all.size(); ++f) {
    const auto n = static_cast<std::size_t>(ranks);
    if ((f + n) % kEvery != 0) continue;
    const Plan plan = plan_of(all[f], ranks, f / 5 + n);
    const std::string what = describe(all[f]) + ", " + std::to_string(ranks) + " ranks";
    ShardedModel model(world, plan, static_cast<unsigned>(f));
    for (int step = 0; step < 2; ++step) {
      model.draw();
      step_and_compare(world, model, 1 + step, what);
    }
    for (const Parameter& p : model.whole()) {
      PYCOMM_CHECK(p.step == 2.0f, "every counter counts: " + what);
    }
  }
}

Form form_of(const std::string& rule, Storage state = Storage::f32) {
  for (const Form& form : forms()) {
    if (form.name == rule && form.param == Storage::bf16 && form.grad == Storage::bf16 &&
        form.master == Storage::none && form.state == state && form.settings.stochastic) {
      return form;
    }
  }
  throw std::logic_error("no such form");
}

// An infinity in any rank's gradient ends the step on all ranks, as one in the average does.
void infinities_skip() {
  for (const char* const rule : {"adam", "lamb", "sgd"}) {
    for (const bool clips : {false, true}) {
      World world(3);
      Plan plan{form_of(rule), 3, kCounts};
      plan.finds = plan.scales = true;
      plan.clips = clips;
      ShardedModel model(world, plan, 1);
      model.draw();
      step_and_compare(world, model, 1, rule);
      for (int r = 0; r < 3; ++r) {
        const std::vector<Parameter> before = model.whole();
        model.draw();
        model.spoil(r, 3, 9218 - 3000 * r, r == 1 ? std::nanf("") : kInfinity);
        step_and_compare(world, model, 2, rule);
        PYCOMM_CHECK(model.memory(0).found == 1.0f, "an infinity must be found");
        for (std::size_t p = 0; p < before.size(); ++p) {
          PYCOMM_CHECK(before[p].param == model.params_of(2, p) && model.whole()[p].step == 1.0f,
                       "a skipped step must touch nothing");
        }
        for (int each = 0; each < 3; ++each) model.memory(each).found = 0.0f;
        model.memory_of_whole().found = 0.0f;
      }
    }
  }
}

// What one rank has found before the step, all ranks find, also a rank with nowhere to note it.
void one_rank_finds_for_all(bool measures) {
  World world(3);
  Plan plan{form_of("lamb"), 3, kCounts};
  plan.finds = true;
  plan.clips = measures;
  ShardedModel model(world, plan, 1);
  model.draw();
  model.memory(1).found = 1.0f;
  model.memory_of_whole().found = 1.0f;
  if (measures) model.step_whole(on_one_thread);  // sets the clip factor
  world.run([&](int r) {
    cpu::ShardedStep step = model.step(r, on_one_thread);
    step.measures = measures;
    if (r == 2) step.control.found_inf = nullptr;
    world[r].run(cpu::sharded_call(step, "one finds"));
  });
  model.memory(2).found = 1.0f;
  model.check("one rank has found an infinity");
}

// Parameters that leave the caches are streamed.
void large_parameters() {
  World world(2);
  Plan plan{form_of("adam"), 2, {(4 << 20) + 1000, 1, 777777}};
  plan.clips = true;
  ShardedModel model(world, plan, 1);
  for (int step = 0; step < 2; ++step) {
    model.draw();
    step_and_compare(world, model, 2, "large parameters");
  }
}

void no_parameters() {
  World world(2);
  Plan plan{form_of("adam"), 2, {0, 0}};
  plan.clips = plan.finds = true;
  ShardedModel model(world, plan, 1);
  model.draw();
  step_and_compare(world, model, 1, "no elements");
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm::test;
  std::vector<std::pair<const char*, std::function<void()>>> tests;
  for (int n = 1; n <= 5; ++n) {
    tests.push_back({"shards change nothing", [=] { shards_change_nothing(n); }});
  }
  tests.push_back({"infinities skip", infinities_skip});
  tests.push_back({"one rank finds for all", [] { one_rank_finds_for_all(false); }});
  tests.push_back({"and also if it measures", [] { one_rank_finds_for_all(true); }});
  tests.push_back({"large parameters", large_parameters});
  tests.push_back({"no parameters", no_parameters});
  return run_all(tests);
}
