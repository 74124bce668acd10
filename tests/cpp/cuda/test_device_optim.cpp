// The optimizers' kernels, run on the CPU (device/cuda_runtime.h). They must give the bits of
// cpu::step() and cpu::grad_norm(), for every rule and storage, at odd sizes and addresses, and
// with special values. Also how a table follows segments that move.
#include <cmath>
#include <cstring>
#include <limits>

#include "core/optim/table.h"
#include "core/reduce.h"
#include "cpu/optim/step.h"
#include "cuda/optim/step.h"
#include "support/dice.h"
#include "support/world.h"

namespace pycomm::test {
namespace {

using Bytes = std::vector<std::byte>;

// How the parts of a segment are stored, and how many elements past an aligned address.
struct Form {
  std::int64_t count;
  Storage param, grad, master, states;
  int shift = 0;
};

float special(Dice& random) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float values[] = {0.0f, -0.0f, 1e-40f, -1e-40f, 1e-20f, 3e38f, kInfinity, -kInfinity};
  const auto pick = random() % 9;
  return pick == 8 ? std::nanf("") : values[pick];
}

// Random numbers in their storage format.
Bytes numbers(Storage storage, std::int64_t n, bool positive, bool specials, Dice& random) {
  Bytes bytes(static_cast<std::size_t>(n * size_of(storage)));
  for (std::int64_t i = 0; i < n; ++i) {
    float value = normal(random) * std::ldexp(1.0f, -static_cast<int>(random() % 12));
    if (specials && random() % 50 == 0) value = special(random);
    if (positive) value *= value;
    std::byte* const to = bytes.data() + i * size_of(storage);
    if (storage == Storage::f32) std::memcpy(to, &value, 4);
    const std::uint16_t bits = storage == Storage::f16    ? float_to_half(value)
                               : storage == Storage::bf16 ? float_to_bfloat16(value)
                                                          : static_cast<std::uint16_t>(random());
    if (storage != Storage::f32) std::memcpy(to, &bits, static_cast<std::size_t>(size_of(storage)));
  }
  return bytes;
}

// Segments and the memory that they point to.
class Parameters {
 public:
  Parameters(const std::vector<Form>& forms, int states, bool specials, unsigned seed)
      : forms_(forms), states_(states) {
    Dice random(seed);
    for (const Form& form : forms) {
      put(numbers(form.param, form.count, false, specials, random));
      put(numbers(form.grad, form.count, false, specials, random));
      put(numbers(form.master, form.count, false, specials, random));
      for (int s = 0; s < kMostStates; ++s) {
        const Storage storage = s < states ? form.states : Storage::none;
        put(numbers(storage, form.count, s > 0, specials, random));
        const std::int64_t blocks = storage == Storage::code8 ? (form.count + 255) / 256 : 0;
        put(numbers(Storage::f32, blocks, true, specials, random));
      }
      steps.push_back(static_cast<float>(random() % 3));
    }
  }

  std::vector<Segment> segments() {
    std::vector<Segment> made;
    std::size_t at = 0;
    for (const Form& form : forms_) {
      const auto next = [&](Storage storage) {
        return memory[at++].data() + kGap + form.shift * size_of(storage);
      };
      Segment segment{};
      segment.param = next(segment.param_storage = form.param);
      segment.grad = next(segment.grad_storage = form.grad);
      segment.master = next(segment.master_storage = form.master);
      for (int s = 0; s < kMostStates; ++s) {
        segment.state_storage[s] = s < states_ ? form.states : Storage::none;
        segment.state[s] = next(segment.state_storage[s]);
        segment.largest[s] = reinterpret_cast<float*>(memory[at++].data() + kGap);
      }
      segment.step = &steps[made.size()];
      segment.count = form.count;
      segment.stream = 3 + made.size();
      made.push_back(segment);
    }
    return made;
  }

  bool operator==(const Parameters& other) const {
    return memory == other.memory && steps == other.steps;
  }

  std::vector<Bytes> memory;
  std::vector<float> steps;

 private:
  static constexpr std::size_t kGap = 64;  // before and after, filled with a pattern

  // Leaves room, because the data is shifted later.
  void put(const Bytes& bytes) {
    const Form& form = forms_[memory.size() / 9];
    Bytes room(bytes.size() + 2 * kGap, std::byte{0xa5});
    const std::size_t shift = form.count == 0 ? 0 : bytes.size() / form.count * form.shift;
    const bool scales = memory.size() % 9 > 3 && memory.size() % 9 % 2 == 0;
    std::copy(bytes.begin(), bytes.end(), room.begin() + kGap + (scales ? 0 : shift));
    memory.push_back(std::move(room));
  }

  std::vector<Form> forms_;
  int states_;
};

// A table and its memory.
class OnDevice {
 public:
  explicit OnDevice(const std::vector<Segment>& segments) { hold(segments); }

  void hold(const std::vector<Segment>& segments) {
    const auto bytes = static_cast<std::size_t>(table_.set(segments));
    if (memory_.size() * 8 < bytes) memory_.assign(bytes / 8, 0xcdcdcdcdcdcdcdcdu);
    table_.upload(memory_.data(), 0, 0);
  }
  cuda::StepJob job(const StepControl& control) const { return {0, 0, &table_, control}; }

 private:
  cuda::SegmentTable table_;
  std::vector<std::uint64_t> memory_;
};

void serial(std::int64_t n, const cpu::Body& body) { body(0, n); }

struct Scalars {
  float scale = 4.0f, found = 0.0f, clip = 0.5f;
  StepControl control() { return {&scale, &found, &clip}; }
};

Settings settings_of(Rule rule) {
  Settings settings;
  settings.rule = rule;
  settings.lr = 0.01;
  settings.beta1 = 0.9;
  settings.beta2 = 0.99;
  settings.eps = 1e-8;
  settings.weight_decay = 0.1;
  settings.momentum = 0.9;
  settings.dampening = 0.1;
  settings.adapt = true;
  settings.seed = 77;
  return settings;
}

struct Optimizer {
  Settings settings;
  int states;
};

std::vector<Optimizer> optimizers() {
  std::vector<Optimizer> made;
  for (const Rule rule : {Rule::adamw, Rule::sgd, Rule::lion, Rule::lamb}) {
    const int states = rule == Rule::adamw || rule == Rule::lamb ? 2 : 1;
    made.push_back({settings_of(rule), states});
    made.push_back(made.back());
    Settings& other = made.back().settings;
    other.decoupled = other.maximize = other.amsgrad = true;
    other.adapt = false;
    other.momentum = 0.0;
    made.back().states = rule == Rule::adamw ? 3 : rule == Rule::sgd ? 0 : states;
  }
  made.push_back({settings_of(Rule::sgd), 1});
  made.back().settings.nesterov = true;
  return made;
}

// Every way to store parameters, gradients, masters and states.
std::vector<Form> every_form() {
  std::vector<Form> forms;
  constexpr std::int64_t counts[] = {0, 1, 255, 256, 1024, 2049, 5000, 300};
  constexpr Storage floats[] = {Storage::f32, Storage::f16, Storage::bf16};
  for (const Storage states : {Storage::f32, Storage::f16, Storage::bf16, Storage::code8}) {
    for (const Storage param : floats) {
      for (const Storage grad : floats) {
        for (const Storage master : {Storage::none, Storage::f32, Storage::remainder}) {
          if (master == Storage::f32 && param == Storage::f32) continue;
          if (master == Storage::remainder && param != Storage::bf16) continue;
          const std::size_t i = forms.size();
          forms.push_back({counts[i % 8], param, grad, master, states, i % 5 == 4 ? 1 : 0});
        }
      }
    }
  }
  return forms;
}

// Formats that have kernels of their own: whole runs, and a few elements more.
std::vector<Form> common_forms() {
  std::vector<Form> forms;
  for (const Storage states : {Storage::f32, Storage::bf16, Storage::code8}) {
    forms.push_back({2500, Storage::f32, Storage::f32, Storage::none, states});
    for (const Storage master : {Storage::none, Storage::f32, Storage::remainder}) {
      forms.push_back({2500, Storage::bf16, Storage::bf16, master, states});
    }
  }
  forms.push_back({9000, Storage::bf16, Storage::bf16, Storage::remainder, Storage::code8, 1});
  return forms;
}

void compare(const std::vector<Form>& forms, const Optimizer& optimizer, bool specials,
             unsigned seed) {
  Settings settings = optimizer.settings;
  settings.stochastic = seed % 2 == 1;
  Parameters want(forms, optimizer.states, specials, seed), got = want;
  Scalars scalars;
  OnDevice on_device(got.segments());
  const float lr = 0.0078125f;  // overrides the settings' rate
  for (int turn = 0; turn < 3; ++turn) {
    settings.lr = lr;
    cpu::step(settings, want.segments(), scalars.control(), serial);
    settings.lr = 1e9;
    // Half of the segments form another group, with the same settings.
    const auto n = static_cast<std::int64_t>(forms.size()), half = n / 2;
    const cuda::StepJob job = on_device.job(scalars.control());
    cuda::step(job, {0, half, settings, &lr, false});
    cuda::step(job, {half, n - half, settings, &lr, false});
    PYCOMM_CHECK(want == got, "bits of rule " + std::to_string(static_cast<int>(settings.rule)) +
                                  ", seed " + std::to_string(seed) + ", turn " +
                                  std::to_string(turn));
    scalars.scale = turn == 0 ? 0.5f : 64.0f;
  }
}

void steps(const std::vector<Form>& forms) {
  unsigned seed = 0;
  for (const Optimizer& optimizer : optimizers()) {
    for (const bool specials : {false, true}) {
      for (int random = 0; random < 2; ++random) compare(forms, optimizer, specials, seed++);
    }
  }
}

void skips() {
  const Settings settings = settings_of(Rule::lamb);
  Parameters before(common_forms(), 2, false, 1), after = before;
  const OnDevice on_device(after.segments());
  for (const float found : {1.0f, 2.0f, std::nanf("")}) {
    Scalars scalars;
    scalars.found = found;
    const auto count = static_cast<std::int64_t>(common_forms().size());
    cuda::step(on_device.job(scalars.control()), {0, count, settings, nullptr, false});
    PYCOMM_CHECK(before == after, "a skipped step changes nothing");
  }
}

// The learning rate: in double, and from the settings.
void rates() {
  const double lr = 0.1;
  for (const bool on_host : {false, true}) {
    Settings settings = settings_of(Rule::adamw);
    settings.lr = lr;
    Parameters want(common_forms(), 2, false, 2), got = want;
    const auto count = static_cast<std::int64_t>(common_forms().size());
    cpu::step(settings, want.segments(), {}, serial);
    const OnDevice on_device(got.segments());
    settings.lr = on_host ? lr : 5.0;
    cuda::step(on_device.job({}), {0, count, settings, on_host ? nullptr : &lr, true});
    PYCOMM_CHECK(want == got, "a rate in double");
  }
}

// Norms of few and many segments, of a segment with more than 1024 sums, with and without
// infinities.
void grad_norms() {
  Dice random(5);
  for (int turn = 0; turn < 8; ++turn) {
    std::vector<Form> forms;
    const int segments = turn == 0 ? 2 : turn == 1 ? 1100 : 40;
    for (int s = 0; s < segments; ++s) {
      constexpr Storage floats[] = {Storage::f32, Storage::f16, Storage::bf16};
      const std::int64_t count =
          turn == 0 ? 1'060'007
                    : static_cast<std::int64_t>(random() % (segments > 100 ? 300 : 9000));
      forms.push_back({s % 7 == 0 ? 0 : count, Storage::f32, floats[random() % 3], Storage::none,
                       Storage::none, static_cast<int>(random() % 2)});
    }
    Parameters parameters(forms, 0, turn % 4 == 3, static_cast<unsigned>(turn));
    Scalars want, got;
    want.found = got.found = turn % 5 == 4 ? 1.0f : 0.0f;
    const double max_norm = turn % 2 == 0 ? 1.0 : 1e6;
    const double norm = cpu::grad_norm(parameters.segments(), want.control(), max_norm, serial);
    const OnDevice on_device(parameters.segments());
    for (int again = 0; again < 2; ++again) {  // tickets have been reset
      double found = -1;
      cuda::grad_norm(on_device.job(got.control()), {max_norm, false, &found});
      PYCOMM_CHECK(std::memcmp(&norm, &found, 8) == 0, "norm of turn " + std::to_string(turn));
      PYCOMM_CHECK(std::memcmp(&want.clip, &got.clip, 4) == 0 && want.found == got.found,
                   "clip and found_inf");
    }
    got.found = 7.0f;
    double found = -1;
    cuda::grad_norm(on_device.job(got.control()), {max_norm, true, &found});
    PYCOMM_CHECK(got.found == (std::isfinite(norm) ? 0.0f : 1.0f), "found_inf overwritten");
  }
}

// Gradients move, segments are added and removed; a table holds what was set last.
void tables() {
  const Settings settings = settings_of(Rule::adamw);
  std::vector<Form> forms = common_forms();
  OnDevice on_device({});
  for (unsigned turn = 0; turn < 8; ++turn) {
    if (turn == 3) forms.resize(4);
    if (turn == 5) {  // more words than a single launch writes
      Form small = forms[1];
      small.count = 40;
      forms.resize(900, small);
    }
    Parameters want(forms, 2, false, turn), got = want;
    const auto count = static_cast<std::int64_t>(forms.size());
    for (int again = 0; again < 2; ++again) {
      std::vector<Segment> segments = got.segments();
      std::vector<Bytes> moved;  // every second gradient, the second time
      for (std::size_t s = 0; again == 1 && s < segments.size(); s += 2) {
        const auto* from = static_cast<const std::byte*>(segments[s].grad);
        moved.emplace_back(from, from + segments[s].count * size_of(segments[s].grad_storage));
        segments[s].grad = moved.back().data();
      }
      cpu::step(settings, want.segments(), {}, serial);
      on_device.hold(segments);
      cuda::step(on_device.job({}), {0, count, settings, nullptr, false});
      PYCOMM_CHECK(want == got, "turn " + std::to_string(turn) + " of a table");
    }
  }
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm::test;
  return run_all({
      {"steps of every form", [] { steps(every_form()); }},
      {"steps of common forms", [] { steps(common_forms()); }},
      {"skipped steps", [] { skips(); }},
      {"learning rates", [] { rates(); }},
      {"grad_norms", [] { grad_norms(); }},
      {"tables", [] { tables(); }},
  });
}
