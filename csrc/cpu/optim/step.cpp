#include "cpu/optim/step.h"

#include <algorithm>

#include "cpu/optim/update.h"

namespace pycomm::cpu {
namespace {

// The sum of squares of a segment's gradients in one chunk.
double square_sum(const Segment& segment, std::int64_t chunk) {
  const Numbers grad{segment.grad_storage, Role::weight,
                     static_cast<std::byte*>(const_cast<void*>(segment.grad)), nullptr, nullptr};
  const std::int64_t at = chunk * kChunk;
  return square_sum(grad, at, std::min(kChunk, segment.count - at));
}

}  // namespace

std::vector<LambSums> lamb_sums(const Settings& settings, const std::vector<Segment>& segments,
                                const StepControl& control, const Parallel& parallel) {
  if (skips(control)) return std::vector<LambSums>(segments.size());
  const Row row(segments);
  const float scale = gradient_factor(settings.maximize, control);
  const auto chunks = static_cast<std::size_t>(row.chunks());
  std::vector<double> weights(chunks), directions(chunks);
  std::vector<LambSums> totals;
  parallel(row.chunks(), [&](std::int64_t begin, std::int64_t end) {
    row.visit(begin, end, [&](std::size_t s, std::int64_t first, std::int64_t last) {
      const Lamb lamb(settings, *segments[s].step + 1.0);
      Reader reader(settings, segments[s], scale);
      for (std::int64_t c = first; c < last; ++c) {
        const LambSums sums = lamb_sums(lamb, reader.load_fp32(c * kChunk));
        weights[row.begin(s) + c] = sums.weights;
        directions[row.begin(s) + c] = sums.directions;
      }
    });
  });
  for (std::size_t s = 0; s < segments.size(); ++s) {
    const std::int64_t begin = row.begin(s), n = row.chunks(s);
    totals.push_back({sum_tree(weights.data() + begin, n), sum_tree(directions.data() + begin, n)});
  }
  return totals;
}

double grad_norm(const std::vector<Segment>& segments, const StepControl& control, double max_norm,
                 const Parallel& parallel) {
  const Row row(segments);
  std::vector<double> sums(static_cast<std::size_t>(row.chunks())), totals;
  parallel(row.chunks(), [&](std::int64_t begin, std::int64_t end) {
    row.visit(begin, end, [&](std::size_t s, std::int64_t first, std::int64_t last) {
      for (std::int64_t c = first; c < last; ++c) {
        sums[row.begin(s) + c] = square_sum(segments[s], c);
      }
    });
  });
  for (std::size_t s = 0; s < segments.size(); ++s) {
    totals.push_back(sum_tree(sums.data() + row.begin(s), row.chunks(s)));
  }
  return conclude(sum_tree(totals.data(), static_cast<std::int64_t>(totals.size())), max_norm,
                  control);
}

void step(const Settings& settings, const std::vector<Segment>& segments,
          const StepControl& control, const Parallel& parallel) {
  if (skips(control)) return;
  const Row row(segments);
  const float scale = gradient_factor(settings.maximize, control);
  std::vector<double> ratios(segments.size(), 1.0);
  if (settings.rule == Rule::lamb && settings.adapt) {
    const std::vector<LambSums> sums = lamb_sums(settings, segments, control, parallel);
    std::transform(sums.begin(), sums.end(), ratios.begin(),
                   [](const LambSums& sum) { return lamb_ratio(sum.weights, sum.directions); });
  }
  const auto before = [](Reader&, std::int64_t, std::int64_t) {};
  const auto after = [](std::int64_t, std::int64_t) {};
  parallel(row.chunks(), [&](std::int64_t begin, std::int64_t end) {
    row.visit(begin, end, [&](std::size_t s, std::int64_t first, std::int64_t last) {
      update(settings, segments[s], scale, ratios[s], first, last, before, after);
    });
  });
  for (const Segment& segment : segments) *segment.step += 1.0f;
}

}  // namespace pycomm::cpu
