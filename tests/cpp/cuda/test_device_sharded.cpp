// The kernels of sharded steps, run on the CPU (device/cuda_runtime.h): every rule with
// every storage. They give the bits of a step of the whole model on averaged gradients, as the executor
// on the CPU does (cpu/test_sharded_step.cpp).
#include <cstring>
#include <limits>

#include "cuda/group.h"
#include "cuda/optim/sharded.h"
#include "support/device_world.h"
#include "support/dice.h"
#include "support/run_all.h"
#include "support/sharded_model.h"

namespace pycomm::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const std::vector<std::int64_t> kCounts = {0, 1, 1024, 9219, 255, 0, 2048, 4099};

// A table and its memory.
class OnDevice {
 public:
  void hold(const cuda::ShardedStep& step) {
    const auto bytes = static_cast<std::size_t>(table_.set(step));
    if (memory_.size() * 8 < bytes) memory_.assign(bytes / 8, 0xcdcdcdcdcdcdcdcdu);
    table_.upload(memory_.data(), 0, 0);
  }
  cuda::Sharding sharding() const { return table_.sharding(); }

 private:
  cuda::ShardTable table_;
  std::vector<std::uint64_t> memory_;
};

// A model on the host and the kernels of all ranks.
class DeviceModel {
 public:
  DeviceModel(const Plan& plan, unsigned seed, double timeout = 60)
      : ranks_(plan.ranks), hosts_(ranks_), device(ranks_, timeout), model(hosts_, plan, seed) {
    tables_.resize(static_cast<std::size_t>(ranks_));
    norms.resize(static_cast<std::size_t>(ranks_));
  }

  cuda::ShardedStep step(int r) {
    const cpu::ShardedStep given = model.step(r, on_one_thread);
    cuda::ShardedStep step;
    for (const cpu::ShardGroup& group : given.groups) {
      step.groups.push_back({group.settings, group.end});
    }
    step.shards = given.shards;
    step.arena = given.arena;
    step.arena_bytes = given.arena_bytes;
    step.sums = given.sums;
    step.control = given.control;
    step.max_norm = given.max_norm;
    step.measures = given.measures;
    step.norm = &norms[static_cast<std::size_t>(r)];
    return step;
  }

  // Enqueues rank r's part.
  void put(int r, const cuda::ShardedStep& step) {
    OnDevice& table = tables_[static_cast<std::size_t>(r)];
    table.hold(step);
    Call call = cuda::step_call(step, "step");
    call.operation.details = hash_of(call.details);  // as cuda::Group does
    device.endpoints[r]->check(call.operation, call.input);
    device.shared->put(r, call.operation, call.input, call.output, 0, table.sharding());
  }

  // Takes one step of both models and compares them.
  void step_and_compare(const std::string& what) {
    const double norm = model.step_whole(on_one_thread);
    for (int r = 0; r < ranks_; ++r) put(r, step(r));
    device.shared->launch();
    for (int r = 0; r < ranks_; ++r) {
      PYCOMM_CHECK(device.endpoints[r]->failure().reason == Reason::none, "no failure: " + what);
      PYCOMM_CHECK(norm == 0.0 || std::memcmp(&norm, &norms[r], 8) == 0, "norm: " + what);
    }
    model.check(what);
  }

 private:
  const int ranks_;
  World hosts_;  // only for their memory

 public:
  DeviceWorld device;
  ShardedModel model;
  std::vector<double> norms;

 private:
  std::vector<OnDevice> tables_;
};

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

// The numbers of ranks from 1 to 4 cover all forms.
void shards_change_nothing(int ranks) {
  const std::vector<Form> all = forms();
  const auto n = static_cast<std::size_t>(ranks);
  for (std::size_t f = 0; f < all.size(); ++f) {
    if ((f + n) % 4 != 0) continue;
    const std::string what = describe(all[f]) + ", " + std::to_string(ranks) + " ranks";
    DeviceModel both(plan_of(all[f], ranks, f / 4 + n), static_cast<unsigned>(f));
    for (int step = 0; step < 2; ++step) {
      both.model.draw();
      both.step_and_compare(what);
    }
  }
}

Form form_of(const std::string& rule) {
  for (const Form& form : forms()) {
    if (form.name == rule && form.param == Storage::bf16 && form.grad == Storage::bf16 &&
        form.master == Storage::none && form.settings.stochastic) {
      return form;
    }
  }
  throw std::logic_error("no such form");
}

// An infinity in any rank's gradient ends the step on all ranks, as one in the average does.
void infinities_skip() {
  for (const char* const rule : {"adam", "lamb", "sgd"}) {
    for (const bool clips : {false, true}) {
      Plan plan{form_of(rule), 3, kCounts};
      plan.finds = plan.scales = true;
      plan.clips = clips;
      DeviceModel both(plan, 1);
      ShardedModel& model = both.model;
      model.draw();
      both.step_and_compare(rule);
      for (int r = 0; r < 3; ++r) {
        model.draw();
        model.spoil(r, 3, 9218 - 3000 * r, r == 1 ? std::nanf("") : kInfinity);
        both.step_and_compare(rule);
        PYCOMM_CHECK(model.memory(0).found == 1.0f, "an infinity must be found");
        PYCOMM_CHECK(model.whole()[3].step == 1.0f, "a skipped step must count nothing");
        for (int each = 0; each < 3; ++each) model.memory(each).found = 0.0f;
        model.memory_of_whole().found = 0.0f;
      }
      model.draw();
      both.step_and_compare(rule);
    }
  }
}

// What one rank has found before the step, all ranks find, also a rank with nowhere to note it.
void one_rank_finds_for_all(bool measures) {
  Plan plan{form_of("lamb"), 3, kCounts};
  plan.finds = true;
  plan.clips = measures;
  DeviceModel both(plan, 1);
  ShardedModel& model = both.model;
  model.draw();
  model.memory(1).found = 1.0f;
  model.memory_of_whole().found = 1.0f;
  if (measures) model.step_whole(on_one_thread);  // sets the clip factor
  for (int r = 0; r < 3; ++r) {
    cuda::ShardedStep step = both.step(r);
    step.measures = measures;
    if (r == 2) step.control.found_inf = nullptr;
    both.put(r, step);
  }
  both.device.shared->launch();
  model.memory(2).found = 1.0f;
  model.check("one rank has found an infinity");
}

// Parameters with more than 1,024 sums, and more parameters than that.
void large_sums() {
  for (const char* const rule : {"adam", "lamb"}) {
    for (const bool many : {false, true}) {
      Plan plan{form_of(rule), 2, many ? std::vector<std::int64_t>(1100, 3) : kCounts};
      if (!many) plan.counts.push_back(1'060'007);
      plan.clips = true;
      DeviceModel both(plan, 1);
      both.model.draw();
      both.step_and_compare("large sums");
    }
  }
}

// A rate on the device replaces that of the settings.
void rates() {
  const Plan plan{form_of("adam"), 2, kCounts};
  const double in_double = plan.form.settings.lr;
  DeviceModel both(plan, 1);
  both.model.draw();
  both.model.step_whole(on_one_thread);
  for (int r = 0; r < 2; ++r) {
    cuda::ShardedStep step = both.step(r);
    step.groups[0].settings.lr = 1e9;
    step.groups[0].lr = &in_double;
    step.groups[0].lr_is_double = true;
    both.put(r, step);
  }
  both.device.shared->launch();
  both.model.check("a rate on the device");
}

// Ranks with launches of their own, through their groups.
void launches_of_their_own() {
  Plan plan{form_of("lamb"), 3, kCounts};
  plan.clips = true;
  DeviceModel both(plan, 1);
  World hosts(3);
  std::vector<std::unique_ptr<cuda::Group>> groups;
  std::vector<OnDevice> tables(3);
  for (int r = 0; r < 3; ++r) {
    // The world owns the groups.
    const std::shared_ptr<cpu::Group> host(std::shared_ptr<void>(), &hosts[r]);
    groups.push_back(std::make_unique<cuda::Group>(host, both.device.endpoints[r], nullptr));
  }
  for (int step = 0; step < 3; ++step) {
    both.model.draw();
    both.model.step_whole(on_one_thread);
    hosts.run([&](int r) {
      const cuda::ShardedStep mine = both.step(r);
      tables[r].hold(mine);
      groups[r]->run(cuda::step_call(mine, "step"), 0, tables[r].sharding());
      groups[r]->check();
    });
    both.model.check("launches of their own");
  }
}

// A rank with other options: no rank changes anything, and each is told.
void ranks_disagree() {
  Plan plan{form_of("adam"), 2, kCounts};
  DeviceModel both(plan, 1);
  both.model.draw();
  const Bytes before = both.model.params_of(0, 3);
  for (int r = 0; r < 2; ++r) {
    cuda::ShardedStep step = both.step(r);
    step.groups[0].settings.lr *= 1 + r;
    both.put(r, step);
  }
  both.device.shared->launch();
  for (int r = 0; r < 2; ++r) {
    PYCOMM_CHECK(both.device.endpoints[r]->failure().reason == Reason::mismatch, "a mismatch");
    PYCOMM_CHECK(both.model.params_of(r, 3) == before, "no parameter has changed");
  }
}

// Memory that other devices cannot use.
void arena_outside() {
  DeviceWorld device(1, 60, true);
  std::vector<std::byte> arena(64);
  cuda::ShardedStep step;
  step.arena = arena.data();
  step.arena_bytes = 64;
  try {
    device.endpoints[0]->check(cuda::step_call(step, "").operation, arena.data());
  } catch (const std::invalid_argument& error) {
    PYCOMM_CHECK(std::string(error.what()).find("group.empty()") != std::string::npos,
                 error.what());
    return;
  }
  PYCOMM_CHECK(false, "must be refused");
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm::test;
  std::vector<std::pair<const char*, std::function<void()>>> tests;
  for (int n = 1; n <= 4; ++n) {
    tests.push_back({"shards change nothing", [=] { shards_change_nothing(n); }});
  }
  tests.push_back({"infinities skip", infinities_skip});
  tests.push_back({"one rank finds for all", [] { one_rank_finds_for_all(false); }});
  tests.push_back({"and also if it measures", [] { one_rank_finds_for_all(true); }});
  tests.push_back({"large sums", large_sums});
  tests.push_back({"rates", rates});
  tests.push_back({"launches of their own", launches_of_their_own});
  tests.push_back({"ranks disagree", ranks_disagree});
  tests.push_back({"an arena outside", arena_outside});
  return run_all(tests);
}
