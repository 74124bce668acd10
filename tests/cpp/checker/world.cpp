#include "checker/world.h"

namespace pycomm::checker {
namespace {

// More rounds than are ever under way.
constexpr int kCarriers = 6;
// A tensor before the operation that makes it.
constexpr int kNoOperation = -1;

bool rounds_once(const Operation& operation) {
  return operation.algorithm == Algorithm::one_shot || operation.algorithm == Algorithm::two_shot;
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

World::World(const std::vector<int>& nodes, const Layout& layout, unsigned seed) : fibers_(seed) {
  int all = 0;
  for (const int ranks : nodes) all += ranks;
  for (int r = 0; r < all; ++r)
    ranks_.push_back({add_thread("rank " + std::to_string(r)), {}, {}, {}, {}, {}, {}});
  int first = 0;
  for (const int ranks : nodes) {
    add_node(first, ranks, layout);
    first += ranks;
  }
  if (nodes.size() > 1) add_links(nodes);
}

Thread* World::add_thread(const std::string& name) {
  const int index = static_cast<int>(threads_.size());
  if (index == kMostThreads) throw std::invalid_argument("too many ranks and links");
  threads_.push_back(std::make_unique<Thread>(index, name));
  memory_.introduce(*threads_.back());
  return threads_.back().get();
}

void World::add_node(int first, int ranks, const Layout& layout) {
  std::vector<Thread*> threads;
  for (int i = 0; i < ranks; ++i) threads.push_back(rank(first + i).thread);
  machines_.push_back(std::make_unique<Machine>(memory_, symbols_, fibers_, layout, threads));
  for (int i = 0; i < ranks; ++i) {
    rank(first + i).comm = std::make_unique<Comm>(*machines_.back(), i);
  }
}

void World::add_links(const std::vector<int>& nodes) {
  const int count = static_cast<int>(nodes.size());
  stripes_ = *std::min_element(nodes.begin(), nodes.end());
  for (int s = 0; s < stripes_; ++s) {
    networks_.push_back(std::make_unique<Network>(memory_, fibers_, count));
    int first = 0;
    for (int m = 0; m < count; ++m) {
      Rank& owner = rank(first + s);
      std::vector<Thread*> carriers;
      for (int i = 0; i < kCarriers; ++i)
        carriers.push_back(add_thread(owner.thread->name + "'s link"));
      owner.link = std::make_unique<Link>(*networks_.back(), m, *owner.thread, std::move(carriers));
      first += nodes[static_cast<std::size_t>(m)];
    }
  }
}

void World::make_tensors(const std::vector<Step>& steps) {
  std::int64_t tensor = 1, scratch = 1;
  for (const Step& step : steps) {
    tensor = std::max(tensor, input_bytes(step.operation, size()));
    tensor = std::max(tensor, output_bytes(step.operation, size()));
    scratch = std::max({scratch, tensor, parcel_buffer_bytes(step.operation, size())});
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
    mine.scratch = add("scratch", scratch, true);
  }
}

Buffers World::buffers(int r, const Step& step) {
  const Rank& mine = rank(r);
  const bool in_window = step.where == Where::window || (step.where == Where::mixed && r == 0);
  const Tensors& tensors = in_window ? mine.window : mine.own;
  return {tensors.input,
          step.in_place ? tensors.input : tensors.output,
          {mine.areas[0], mine.areas[1]},
          mine.scratch};
}

// What the user does before an operation.
void World::fill(int r, const Step& step, int operation) {
  const Unit unit{size_of(step.operation.dtype)};
  const Buffers mine = buffers(r, step);
  const auto write = [&](std::byte* tensor, std::int64_t bytes, int what) {
    const Symbol symbol = symbols_.contribution({what, r});
    memory_.write(*rank(r).thread, tensor, {{bytes / unit.bytes, symbol, 0}}, unit);
  };
  if (!step.in_place) write(mine.output, output_bytes(step.operation, size()), kNoOperation);
  write(mine.input, input_bytes(step.operation, size()), operation);
}

void World::execute(int r, const Step& step, int fail_at) {
  Rank& mine = rank(r);
  if (stripes_ > 0) {
    run_between_nodes(*mine.comm, mine.link.get(), stripes_, step.operation, buffers(r, step));
  } else if (step.stripes) {
    run_stripes(*mine.comm, step.operation, buffers(r, step));
  } else {
    run_on_node(*mine.comm, step.operation, buffers(r, step), fail_at);
  }
}

// The operation has raised, so its tensors are the user's.
void World::give_back(int r, const Step& step) { fill(r, step, kNoOperation); }

void World::live(int r, const std::vector<Step>& steps, const Fault& fault) {
  Rank& mine = rank(r);
  for (std::size_t s = 0; s < steps.size(); ++s) {
    const bool fails = fault.rank == r && fault.step == s;
    mine.thread->begin(describe(steps[s], s));
    fill(r, steps[s], static_cast<int>(s));
    bool stopped = false;
    try {
      execute(r, steps[s], fails ? fault.wait : Comm::kNeverFails);
    } catch (const Stopped&) {
      stopped = true;
    }
    if (stopped) {
      if (fails && fault.dies) return mine.comm->die();
      mine.comm->abort();
      if (fault.retreats) mine.comm->retreat();
      return give_back(r, steps[s]);
    }
    const Unit unit{size_of(steps[s].operation.dtype)};
    const std::int64_t count = output_bytes(steps[s].operation, size()) / unit.bytes;
    result(r, s) = {true, mine.comm->waits(),
                    memory_.read(*mine.thread, buffers(r, steps[s]).output, count, unit),
                    mine.comm->signalled()};
  }
}

void World::run(const std::vector<Step>& steps, const Fault& fault) {
  make_tensors(steps);
  results_.assign(steps.size(), std::vector<Result>(ranks_.size()));
  fibers_.run(size(), [&](int r) { live(r, steps, fault); });
  for (std::size_t s = 0; s < steps.size(); ++s) check(steps[s], s);
}

void World::check(const Step& step, std::size_t index) const {
  const Result* first = nullptr;
  for (int r = 0; r < size(); ++r) {
    const Result& mine = result(r, index);
    if (!mine.succeeded) continue;
    check_output(step, index, r);
    if (first == nullptr) first = &mine;
    if (stripes_ == 0 && mine.signalled != first->signalled) {
      throw Violation("ranks signal unequally often in " + describe(step, index));
    }
    if (step.operation.collective == Collective::all_reduce && mine.output != first->output) {
      throw Violation("ranks have different bits after " + describe(step, index));
    }
  }
}

void World::check_output(const Step& step, std::size_t index, int r) const {
  const Operation& operation = step.operation;
  const auto wrong = [&](const Piece& piece, const std::string& what) {
    throw Violation("after " + describe(step, index) + " rank " + std::to_string(r) + " has " +
                    what + " at element " + std::to_string(piece.element) + ": " +
                    symbols_.text(piece.symbol));
  };
  const bool gathers = operation.collective == Collective::all_gather;
  const bool sums = operation.collective == Collective::all_reduce ||
                    operation.collective == Collective::reduce_scatter;
  std::int64_t at = 0;
  for (const Piece& piece : result(r, index).output) {
    const std::int64_t owner = gathers ? at / operation.count : operation.root;
    std::int64_t element = gathers ? at % operation.count : at;
    if (operation.collective == Collective::reduce_scatter) element += r * operation.count;
    at += piece.units;
    if (piece.element != element) wrong(piece, "another element");
    std::vector<Contribution> found = symbols_.contributions(piece.symbol), wanted;
    for (int from = 0; from < size(); ++from) {
      if (sums || from == owner) wanted.push_back({static_cast<int>(index), from});
    }
    // Where the shot algorithms add, it is in the order of ranks.
    if (!rounds_once(operation)) std::sort(found.begin(), found.end());
    if (found != wanted) wrong(piece, "wrong contributions");
  }
}

}  // namespace pycomm::checker
