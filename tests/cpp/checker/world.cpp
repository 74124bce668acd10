#include "checker/world.h"

#include "core/algorithms/sharded_step.h"

namespace pycomm::checker {
namespace {

// More batches than are ever in flight.
constexpr int kCarriers = kStepsAhead + 2;
constexpr int kFewCarriers = 5;  // for many nodes, which have no relays here
constexpr Unit kResidual{4};
// The operation of a tensor's content before any operation has written it.
constexpr int kNoOperation = -1;

bool rounds_once(const Operation& operation) {
  return operation.algorithm == Algorithm::one_shot || operation.algorithm == Algorithm::two_shot;
}

std::vector<int> first_ranks(int count) {
  std::vector<int> ranks;
  for (int r = 0; r < count; ++r) ranks.push_back(r);
  return ranks;
}

}  // namespace

std::string describe(const Step& step, std::size_t index) {
  const Operation& operation = step.operation;
  const char* const places[] = {"in windows", "elsewhere", "in rank 0's window"};
  return "operation " + std::to_string(index) + " (" + name_of(operation.collective) + " " +
         name_of(operation.algorithm) + ", " + std::to_string(operation.count) + " " +
         name_of(operation.dtype) + " " + places[static_cast<int>(step.where)] + ", " +
         describe(operation.codec) + (step.stripes ? ", in stripes" : "") + ")";
}

std::int64_t World::residual_bytes(const Step& step) const {
  return reduced_elements(step.operation, size()) * kResidual.bytes;
}

World::World(const Nodes& nodes, const Layout& layout, unsigned seed)
    : fibers_(seed), nodes_(nodes) {
  int all = 0;
  for (const auto& ranks : nodes) all += static_cast<int>(ranks.size());
  ranks_.resize(static_cast<std::size_t>(all));
  for (int r = 0; r < all; ++r) rank(r).thread = add_thread(r, "rank " + std::to_string(r));
  for (const auto& ranks : nodes) add_node(ranks, layout);
  if (nodes.size() > 1) add_links(nodes);
}

World::World(int ranks, const Layout& layout, unsigned seed)
    : World(Nodes{first_ranks(ranks)}, layout, seed) {}

Thread* World::add_thread(int process, const std::string& name) {
  const int index = static_cast<int>(threads_.size());
  if (index == kMostThreads) throw std::invalid_argument("too many ranks and links");
  threads_.push_back(std::make_unique<Thread>(index, process, name));
  memory_.introduce(*threads_.back());
  return threads_.back().get();
}

void World::add_node(const std::vector<int>& ranks, const Layout& layout) {
  std::vector<Thread*> threads;
  for (const int r : ranks) threads.push_back(rank(r).thread);
  memories_.push_back(std::make_unique<Node>(memory_, symbols_, fibers_, layout, threads));
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    rank(ranks[i]).comm = std::make_unique<Comm>(*memories_.back(), static_cast<int>(i));
  }
}

void World::add_links(const Nodes& ranks) {
  pycomm::Nodes nodes{ranks};
  for (int s = 0; s < nodes.stripes(); ++s) {
    networks_.push_back(std::make_unique<cpu::Network>(nodes.count()));
  }
  for (nodes.here = 0; nodes.here < nodes.count(); ++nodes.here) {
    for (int i = 0; i < nodes.size(nodes.here); ++i) {
      const int r = nodes.rank(nodes.here, i);
      Rank& mine = rank(r);
      std::shared_ptr<cpu::Transport> transport;
      if (i < nodes.stripes()) {
        std::vector<Thread*> carriers;
        const int links = nodes.count() > kMostNodesSentTo ? kFewCarriers : kCarriers;
        for (int c = 0; c < links; ++c)
          carriers.push_back(add_thread(r, mine.thread->name + "'s link"));
        transport = std::make_shared<cpu::Transport>(*networks_[static_cast<std::size_t>(i)],
                                                     std::move(carriers));
      }
      mine.internode = std::make_unique<cpu::InternodeGroup>(
          *mine.comm, nodes, std::move(transport), cpu::Clock::duration{});
    }
  }
}

void World::make_tensors(const std::vector<Step>& steps) {
  std::int64_t tensor = 1, residual = 1;
  for (const Step& step : steps) {
    for (int r = 0; r < size(); ++r) {
      tensor = std::max(tensor, input_bytes(step.operation, size(), r));
      tensor = std::max(tensor, output_bytes(step.operation, size(), r));
    }
    if (step.feedback) residual = std::max(residual, residual_bytes(step));
  }
  for (int r = 0; r < size(); ++r) {
    Rank& mine = rank(r);
    std::int64_t lists = 1;
    for (const Step& step : steps) {
      if (step.operation.codec.kind != CodecKind::topk) continue;
      lists = std::max(lists, list_area_bytes(step.operation, size(), r));
    }
    const auto add = [&](const std::string& name, std::int64_t bytes, bool shared) {
      return memory_.add(mine.thread->name + "'s " + name, mine.thread->index, bytes, shared);
    };
    mine.window = {add("input in the window", tensor, true),
                   add("output in the window", tensor, true)};
    mine.own = {add("input", tensor, false), add("output", tensor, false)};
    for (std::byte*& area : mine.areas) area = add("lists", lists, true);
    mine.scratch = add("scratch", tensor, true);
    mine.residual = add("residual", residual, false);
    mine.sums = add("sums", 2 * 8 * size(), true);
  }
}

Buffers World::buffers(int r, const Step& step) {
  const Rank& mine = rank(r);
  const bool in_window = step.where == Where::window || (step.where == Where::mixed && r == 0);
  const Tensors& tensors = in_window ? mine.window : mine.own;
  Buffers buffers{{step.operation, tensors.input, step.in_place ? tensors.input : tensors.output},
                  {mine.areas[0], mine.areas[1]},
                  mine.scratch};
  if (step.feedback) buffers.call.feedback.residual = reinterpret_cast<float*>(mine.residual);
  for (const Rank& each : ranks_) {
    buffers.shared.push_back({each.window.input, each.window.output, each.sums});
  }
  buffers.measures = step.measures;
  buffers.adapts = step.adapts;
  return buffers;
}

void World::fill(int r, const Step& step, int operation) {
  const Unit unit{size_of(step.operation.dtype)};
  const Call call = buffers(r, step).call;
  const auto write = [&](const void* tensor, std::int64_t bytes, Unit unit, int what) {
    const Symbol symbol = symbols_.contribution({what, r});
    auto* const to = static_cast<std::byte*>(const_cast<void*>(tensor));
    memory_.write(*rank(r).thread, to, {{bytes / unit.bytes, symbol, 0}}, unit);
  };
  if (!step.in_place)
    write(call.output, output_bytes(step.operation, size(), r), unit, kNoOperation);
  write(call.input, input_bytes(step.operation, size(), r), unit, operation);
  if (step.feedback) {
    write(call.feedback.residual, residual_bytes(step), kResidual, kNoOperation);
  }
}

void World::execute(int r, const Step& step) {
  Rank& mine = rank(r);
  const Buffers buffers = this->buffers(r, step);
  if (mine.internode != nullptr) {
    mine.internode->run(step.operation, buffers.call, nullptr, nullptr);
    mine.comm->finish();
  } else if (step.stripes) {
    run_stripes(*mine.comm, buffers);
  } else {
    run_on_node(*mine.comm, buffers);
  }
}

// Like cpu/group/group.cpp.
void World::retreat(int r) {
  Rank& mine = rank(r);
  mine.comm->leave_peers_heaps();
  if (mine.internode != nullptr) mine.internode->stop();
  mine.comm->retreat();
}

// After a failure, parameters have changed only if a rank has said so before.
void World::check_half_done(int r, const Step& step) {
  const Comm& comm = *rank(r).comm;
  if (step.operation.collective != Collective::sharded_step || comm.anyone_signalled(kUpdating)) {
    return;
  }
  for (const Piece& piece : result_of(r, step).output) {
    if (piece.symbol != symbols_.contribution({kNoOperation, r})) {
      throw Violation("parameters have changed, and rank " + std::to_string(r) + " is not told");
    }
  }
}

void World::live(int r, const std::vector<Step>& steps, const Fault& fault) {
  Rank& mine = rank(r);
  for (std::size_t s = 0; s < steps.size(); ++s) {
    const bool fails = fault.rank == r && fault.step == s;
    mine.thread->begin(describe(steps[s], s));
    fill(r, steps[s], static_cast<int>(s));
    mine.comm->fail_at(fails ? fault.wait : Comm::kNeverFails);
    bool stopped = false;
    try {
      execute(r, steps[s]);
    } catch (const Stopped&) {
      stopped = true;
    }
    if (stopped) {
      if (fails && fault.dies) return mine.comm->die();
      mine.comm->abort();
      if (fault.retreats) {
        retreat(r);
        check_half_done(r, steps[s]);
      }
      return fill(r, steps[s], kNoOperation);  // the tensors belong to the caller again
    }
    result(r, s) = result_of(r, steps[s]);
  }
}

World::Result World::result_of(int r, const Step& step) {
  const Rank& mine = rank(r);
  const auto read = [&](std::byte* from, std::int64_t bytes, Unit unit) {
    return memory_.read(*mine.thread, from, bytes / unit.bytes, unit);
  };
  auto* const output = static_cast<std::byte*>(buffers(r, step).call.output);
  const std::int64_t residual = step.feedback ? residual_bytes(step) : 0;
  return {true, mine.comm->waits(),
          read(output, output_bytes(step.operation, size(), r), {size_of(step.operation.dtype)}),
          read(mine.residual, residual, kResidual), mine.comm->signalled()};
}

void World::run(const std::vector<Step>& steps, const Fault& fault) {
  make_tensors(steps);
  results_.assign(steps.size(), std::vector<Result>(ranks_.size()));
  set_running([this]() -> Comm& { return *ranks_[fibers_.current()].comm; });
  fibers_.run(size(), [&](int r) { live(r, steps, fault); });
  for (std::size_t s = 0; s < steps.size(); ++s) check(steps[s], s);
}

void World::check(const Step& step, std::size_t index) const {
  check_residuals(step, index);
  const Result* first = nullptr;
  for (int r = 0; r < size(); ++r) {
    const Result& mine = result(r, index);
    if (!mine.succeeded) continue;
    check_output(step, index, r);
    if (first == nullptr) first = &mine;
    if (nodes_.size() == 1 && mine.signalled != first->signalled) {
      throw Violation("ranks signal unequally often in " + describe(step, index));
    }
    if (step.operation.collective == Collective::all_reduce && mine.output != first->output) {
      throw Violation("ranks have different bits after " + describe(step, index));
    }
  }
}

// Whatever was not sent is in the residual of exactly one rank: nothing is lost or doubled.
void World::check_residuals(const Step& step, std::size_t index) const {
  std::vector<Pieces> residuals;
  for (int r = 0; r < size(); ++r) {
    if (!result(r, index).succeeded) return;
    residuals.push_back(result(r, index).residual);
  }
  zip(residuals, kResidual, [&](std::int64_t, const std::vector<Piece>& pieces) {
    std::vector<bool> found(ranks_.size());
    for (const Piece& piece : pieces) {
      for (const Contribution& part : symbols_.contributions(piece.symbol)) {
        if (part == kZero) continue;
        if (found[static_cast<std::size_t>(part.rank)]) {
          throw Violation("a residual is there twice after " + describe(step, index));
        }
        found[static_cast<std::size_t>(part.rank)] = true;
      }
    }
    if (std::find(found.begin(), found.end(), false) != found.end()) {
      throw Violation("a residual is lost in " + describe(step, index));
    }
  });
}

void World::check_output(const Step& step, std::size_t index, int r) const {
  const Operation& operation = step.operation;
  const auto wrong = [&](const Piece& piece, const std::string& what) {
    throw Violation("after " + describe(step, index) + " rank " + std::to_string(r) + " has " +
                    what + " at element " + std::to_string(piece.element) + ": " +
                    symbols_.text(piece.symbol));
  };
  const Collective collective = operation.collective;
  const bool in_blocks = collective == Collective::all_gather || collective == Collective::gather ||
                         collective == Collective::all_to_all;
  const bool from_blocks = collective == Collective::reduce_scatter ||
                           collective == Collective::scatter ||
                           collective == Collective::all_to_all;
  const bool sums = reduces(collective) || collective == Collective::sharded_step;
  std::int64_t at = 0;
  for (const Piece& piece : result(r, index).output) {
    const std::int64_t owner = in_blocks ? at / operation.count : operation.root;
    const std::int64_t element =
        (in_blocks ? at % operation.count : at) + (from_blocks ? r * operation.count : 0);
    at += piece.units;
    if (piece.element != element) wrong(piece, "another element");
    std::vector<Contribution> found = symbols_.contributions(piece.symbol), wanted;
    for (const auto& node : nodes_) {
      for (const int from : node) {
        if (sums || from == owner) wanted.push_back({static_cast<int>(index), from});
      }
    }
    // The shot algorithms add in the order of nodes, and of ranks within each node.
    if (!rounds_once(operation)) {
      std::sort(found.begin(), found.end());
      std::sort(wanted.begin(), wanted.end());
    }
    if (found != wanted) wrong(piece, "wrong contributions");
  }
}

}  // namespace pycomm::checker
