// Sharded steps that fail: all ranks raise, and know whether parameters may have changed.
#include <string>

#include "support/run_all.h"
#include "support/sharded_model.h"

namespace pycomm::test {
namespace {

const std::vector<std::int64_t> kCounts = {1, 9219, 255, 4099};

Plan plan_for(int ranks, bool clips) {
  for (const Form& form : forms()) {
    if (form.name != "adam" || form.param != Storage::bf16 || form.master != Storage::remainder) {
      continue;
    }
    Plan plan{form, ranks, kCounts};
    plan.clips = clips;
    return plan;
  }
  throw std::logic_error("no such form");
}

// How a rank's step has ended.
struct End {
  std::string error;
  Reason reason = Reason::none;
  bool half_done = false;
};

End run_step(cpu::Group& group, cpu::ShardedStep step, const std::string& label = "step",
             void (*interrupt)() = nullptr) {
  End end;
  try {
    group.run(cpu::sharded_call(step, label), interrupt);
  } catch (const CollectiveError& error) {
    end.error = error.what();
    end.reason = error.reason;
  } catch (const std::exception& error) {
    end.error = error.what();
  }
  end.half_done = step.half_done;
  return end;
}

void check_ends(const std::vector<End>& ends, Reason reason, bool half_done) {
  for (const End& end : ends) {
    PYCOMM_CHECK(end.reason == reason, "all raise the same, one raised: " + end.error);
    PYCOMM_CHECK(end.half_done == half_done, "half_done after: " + end.error);
  }
}

void check_unchanged(ShardedModel& model, int ranks) {
  for (int r = 0; r < ranks; ++r) {
    for (std::size_t p = 0; p < kCounts.size(); ++p) {
      PYCOMM_CHECK(model.params_of(r, p) == model.whole()[p].param, "parameters have changed");
    }
  }
}

void disagreement() {
  for (const bool clips : {false, true}) {
    World world(3);
    ShardedModel model(world, plan_for(3, clips), 1);
    model.draw();
    std::vector<End> ends(3);
    world.run([&](int r) {
      ends[static_cast<std::size_t>(r)] =
          run_step(world[r], model.step(r, on_one_thread), r == 1 ? "max_norm=1" : "max_norm=2");
    });
    check_ends(ends, Reason::mismatch, false);
    for (const char* const part : {"rank 1", "max_norm=1", "max_norm=2"}) {
      PYCOMM_CHECK(ends[2].error.find(part) != std::string::npos, "must tell: " + ends[2].error);
    }
    check_unchanged(model, 3);
  }
}

// Also after steps that have succeeded, which leave their signals.
void a_silent_rank() {
  for (const int before : {0, 2}) {
    World world(3, 64 << 10, 0xfffffffa, 0.3);
    ShardedModel model(world, plan_for(3, true), 1);
    for (int step = 0; step < before; ++step) {
      model.draw();
      model.step_whole(on_one_thread);
      std::vector<End> ends(3);
      world.run([&](int r) {
        ends[static_cast<std::size_t>(r)] = run_step(world[r], model.step(r, on_one_thread));
      });
      check_ends(ends, Reason::none, false);
    }
    std::vector<End> ends(2);
    world.run([&](int r) {
      if (r == 2) return;
      ends[static_cast<std::size_t>(r)] = run_step(world[r], model.step(r, on_one_thread));
    });
    check_ends(ends, Reason::timeout, false);
    check_unchanged(model, 3);
  }
}

// A rank fails in the first or second of its passes over all chunks: with clipping the first one
// measures, and the last one updates.
void a_rank_fails(bool clips, int pass, bool leaves) {
  World world(3);
  ShardedModel model(world, plan_for(3, clips), 1);
  model.draw();
  std::vector<End> ends(3);
  world.run([&](int r) {
    int passes = 0;
    const cpu::Parallel parallel = [&](std::int64_t n, const cpu::Body& body) {
      if (r != 1 || passes++ != pass) return body(0, n);
      body(0, n / 2);
      if (leaves) world[r].leave();
      throw std::runtime_error("out of threads");
    };
    ends[static_cast<std::size_t>(r)] = run_step(world[r], model.step(r, parallel));
  });
  const bool updates = pass == (clips ? 1 : 0);
  PYCOMM_CHECK(ends[1].error == "out of threads", "the rank's own error: " + ends[1].error);
  for (const int r : {0, 2}) {
    const Reason reason = ends[static_cast<std::size_t>(r)].reason;
    PYCOMM_CHECK(reason == Reason::aborted || (leaves && reason == Reason::peer_died),
                 "others raise, too: " + ends[static_cast<std::size_t>(r)].error);
  }
  for (const End& end : ends) {
    PYCOMM_CHECK(end.half_done == updates, "half_done after: " + end.error);
  }
  if (!updates) check_unchanged(model, 3);
}

// A tensor outside the window cannot be reached by others, so no rank begins.
void an_arena_elsewhere() {
  World world(2);
  ShardedModel model(world, plan_for(2, false), 1);
  model.draw();
  std::vector<End> ends(2);
  world.run([&](int r) {
    cpu::ShardedStep step = model.step(r, on_one_thread);
    Bytes own(static_cast<std::size_t>(step.arena_bytes));
    if (r == 1) step.arena = own.data();
    ends[static_cast<std::size_t>(r)] = run_step(world[r], step);
  });
  for (const End& end : ends) {
    PYCOMM_CHECK(end.error.find("windows") != std::string::npos, "must tell: " + end.error);
    PYCOMM_CHECK(!end.half_done, "nothing has changed");
  }
  check_unchanged(model, 2);
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm::test;
  return run_all({
      {"disagreement", disagreement},
      {"a silent rank", a_silent_rank},
      {"a rank fails in an update", [] { a_rank_fails(false, 0, false); }},
      {"a rank fails as it measures", [] { a_rank_fails(true, 0, false); }},
      {"a rank fails in an update after measuring", [] { a_rank_fails(true, 1, false); }},
      {"a rank leaves in an update", [] { a_rank_fails(false, 0, true); }},
      {"a rank leaves as it measures", [] { a_rank_fails(true, 0, true); }},
      {"an arena elsewhere", an_arena_elsewhere},
  });
}
