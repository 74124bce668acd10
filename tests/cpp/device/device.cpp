// The implementation of cuda_runtime.h: blocks and threads.
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "../support/dice.h"
#include "census.h"
#include "cuda_runtime.h"

namespace device {

thread_local dim3 thread_index, block_index, block_size, grid_size;

namespace {

using pycomm::test::Dice;

// Saves the callee-saved registers, switches stacks, and continues where the other stack has
// stopped.
extern "C" void pycomm_switch_stacks(void** from, void* to);
asm(R"(
.globl pycomm_switch_stacks
pycomm_switch_stacks:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");

// A lock of which ThreadSanitizer knows nothing: through a mutex, kernels that share only this file would
// be ordered.
class QuietGuard {
 public:
  explicit QuietGuard(char& lock) : lock_(lock) {
    while (__atomic_test_and_set(&lock_, __ATOMIC_ACQUIRE)) sched_yield();
  }
  ~QuietGuard() { __atomic_clear(&lock_, __ATOMIC_RELEASE); }
  QuietGuard(const QuietGuard&) = delete;
  QuietGuard& operator=(const QuietGuard&) = delete;

 private:
  char& lock_;
};

thread_local int this_device = 0;

// Enough for a report of ThreadSanitizer. Not a power of two, so that stacks share no sets of caches.
constexpr std::size_t kStack = (260 << 10) + 64;
constexpr unsigned kWarp = 32;
constexpr unsigned kMostThreads = 1024;  // of a block

enum class State { ready, at_block, at_warp, done };

struct Fiber {
  void* stack;
  State state;
  Actor* actor;
};

// Rounds alternate between two sets of values, and between two addresses at which barriers publish: a
// slow thread may still read the previous ones.
struct Warp {
  unsigned arrived = 0, alive = kWarp, round = 0;
  std::uint64_t values[2][kWarp];
  std::uint64_t barrier[2];
};

struct Block {
  const std::function<void()>* kernel;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  void* scheduler = nullptr;
  Actor* scheduling = nullptr;
  unsigned current = 0, arrived = 0, alive = 0, round = 0;
  std::uint64_t barrier[2];  // as a warp's
  std::uint64_t begin, end;  // the addresses at which the threads' lives are ordered
  bool vote = false, result = false;
  std::uint32_t asleep = 0;  // warps
};

thread_local Block* block = nullptr;

void leave(State state) {
  Fiber& fiber = block->fibers[block->current];
  fiber.state = state;
  become(block->scheduling);
  pycomm_switch_stacks(&fiber.stack, block->scheduler);
}

void release(unsigned warp) {
  Warp& meeting = block->warps[warp];
  if (meeting.arrived != meeting.alive) return;
  meeting.arrived = 0;
  ++meeting.round;
  for (unsigned i = warp * kWarp; i < (warp + 1) * kWarp; ++i) {
    if (block->fibers[i].state == State::at_warp) block->fibers[i].state = State::ready;
  }
}

void body() {
  observe(&block->begin);
  (*block->kernel)();
  publish(&block->end);
  const unsigned warp = block->current / kWarp;
  --block->alive;
  --block->warps[warp].alive;
  release(warp);
  leave(State::done);
}

// The threads of a block: their stacks, and what ThreadSanitizer takes them for.
struct Team {
  std::byte* stacks;
  std::array<Actor*, kMostThreads> actors{};
};

// Blocks that have ended leave their team to the same block of a later kernel of the stream: to make
// another one takes longer than most kernels. Teams of two streams share no actors.
using TeamKey = std::pair<Actor*, unsigned>;
std::map<TeamKey, std::vector<Team>> unused_teams;
char teams_lock = 0;

Team take_team(TeamKey key, unsigned threads) {
  Team team{};
  {
    const QuietGuard guard(teams_lock);
    std::vector<Team>& unused = unused_teams[key];
    if (!unused.empty()) {
      team = unused.back();
      unused.pop_back();
    }
  }
  if (team.stacks == nullptr) {
    team.stacks =
        static_cast<std::byte*>(mmap(nullptr, kStack * kMostThreads, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  }
  for (unsigned i = 0; i < threads; ++i) {
    if (team.actors[i] == nullptr) team.actors[i] = make_actor();
  }
  return team;
}

void prepare(Block& to, const Team& team, unsigned threads) {
  to.scheduling = current_actor();
  to.alive = threads;
  to.warps.resize(threads / kWarp);
  for (unsigned i = 0; i < threads; ++i) {
    auto** top = reinterpret_cast<void**>(team.stacks + kStack * (i + 1) - 64);
    *--top = nullptr;  // return address of body()
    *--top = reinterpret_cast<void*>(&body);
    to.fibers.push_back({top - 6, State::ready, team.actors[i]});
  }
}

// Runs each thread that is ready once, in a new order. Returns true if any of them could run.
bool take_turns(std::vector<unsigned>& order, Dice& random) {
  switch (random() % 3) {
    case 0:
      std::shuffle(order.begin(), order.end(), random);
      break;
    case 1:
      std::iota(order.begin(), order.end(), 0u);
      break;
    default:
      std::iota(order.rbegin(), order.rend(), 0u);
  }
  // Sleeping warps let the others run ahead, as far as barriers allow.
  if (random() % 16 == 0) block->asleep = random() & random();
  bool ran = false, slept = false;
  for (const unsigned i : order) {
    if (block->fibers[i].state != State::ready) continue;
    if ((block->asleep >> i / kWarp % 32 & 1) != 0) {
      slept = true;
      continue;
    }
    ran = true;
    block->current = i;
    thread_index.x = i;
    become(block->fibers[i].actor);
    pycomm_switch_stacks(&block->scheduler, block->fibers[i].stack);
  }
  if (!ran) block->asleep = 0;
  return ran || slept;
}

void run(Block& to, Actor* stream, unsigned index, dim3 grid, dim3 threads) {
  block = &to;
  block_index.x = index;
  block_size.x = threads.x;
  grid_size.x = grid.x;
  const TeamKey key{stream, index};
  const Team team = take_team(key, threads.x);
  prepare(to, team, threads.x);
  publish(&to.begin);
  Dice random(std::random_device{}());
  std::vector<unsigned> order(threads.x);
  std::iota(order.begin(), order.end(), 0u);
  unsigned rounds = 0;
  while (to.alive > 0) {
    const bool ran = take_turns(order, random);
    if (to.alive > 0 && to.arrived == to.alive) {
      to.result = to.vote;
      to.vote = false;
      to.arrived = 0;
      ++to.round;
      for (Fiber& fiber : to.fibers) {
        if (fiber.state == State::at_block) fiber.state = State::ready;
      }
    } else if (!ran) {
      std::fprintf(stderr, "threads of a block wait for each other at different barriers\n");
      std::abort();
    } else if (++rounds % 64 == 0) {
      sched_yield();  // they may wait for another block
    }
  }
  observe(&to.end);
  const QuietGuard guard(teams_lock);
  unused_teams[key].push_back(team);
}

char loaded_lock = 0;  // guards the kernels that are loaded, and how many launched ones were not
std::set<const void*> loaded;
int unloaded = 0;

}  // namespace

int current_device() { return this_device; }
void set_device(int device) { this_device = device; }

void pause() { leave(State::ready); }

bool meet(bool vote) {
  const void* const barrier = &block->barrier[block->round % 2];
  publish(barrier);
  block->vote |= vote;
  ++block->arrived;
  leave(State::at_block);
  observe(barrier);
  return block->result;
}

const std::uint64_t* exchange(std::uint64_t value, bool barrier) {
  const unsigned warp = thread_index.x / kWarp;
  Warp& meeting = block->warps[warp];
  std::uint64_t* const values = meeting.values[meeting.round % 2];
  const void* const place = &meeting.barrier[meeting.round % 2];
  if (barrier) publish(place);
  values[thread_index.x % kWarp] = value;
  ++meeting.arrived;
  block->fibers[block->current].state = State::at_warp;
  release(warp);
  leave(block->fibers[block->current].state);
  if (barrier) observe(place);
  return values;
}

int launch(const void* kernel, std::function<void()> run_thread, dim3 grid, dim3 threads,
           Stream* stream) {
  {
    const QuietGuard guard(loaded_lock);
    if (!loaded.contains(kernel)) ++unloaded;
  }
  count_launch(kernel);
  enqueue(stream, [=, device = current_device()] {
    Actor* const actor = current_actor();
    std::vector<Block> blocks(grid.x);
    std::vector<std::thread> running;
    for (unsigned i = 0; i < grid.x; ++i) {
      blocks[i].kernel = &run_thread;
      running.emplace_back([&, i] {
        set_device(device);
        run(blocks[i], actor, i, grid, threads);
      });
    }
    for (std::thread& thread : running) thread.join();
  });
  return cudaSuccess;
}

int unloaded_launches() {
  const QuietGuard guard(loaded_lock);
  return unloaded;
}

}  // namespace device

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void* kernel) {
  const device::QuietGuard guard(device::loaded_lock);
  device::loaded.insert(kernel);
  return cudaSuccess;
}
