// The implementation of cuda_runtime.h: blocks and threads.
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "cuda_runtime.h"

namespace device {

thread_local dim3 thread_index, block_index, block_size, grid_size;

namespace {

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

constexpr std::size_t kStack = 96 << 10;
constexpr unsigned kWarp = 32;
constexpr unsigned kMostThreads = 1024;  // of a block

// A kernel takes one struct by value, which the ABI copies to the stack, so any struct that is
// large enough serves all kernels.
struct alignas(16) Arguments {
  std::byte bytes[8 << 10];
};
using Kernel = void (*)(Arguments);

enum class State { ready, at_block, at_warp, done };

struct Fiber {
  void* stack;
  State state;
};

struct Warp {
  unsigned arrived = 0, alive = kWarp, round = 0;
  std::uint64_t values[2][kWarp];  // alternate: a slow thread may still read the previous ones
};

struct Block {
  Kernel kernel;
  const Arguments* arguments;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  void* scheduler = nullptr;
  unsigned current = 0, arrived = 0, alive = 0;
  bool vote = false, result = false;
  std::uint32_t asleep = 0;  // warps
};

thread_local Block* block = nullptr;

void leave(State state) {
  Fiber& fiber = block->fibers[block->current];
  fiber.state = state;
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
  block->kernel(*block->arguments);
  const unsigned warp = block->current / kWarp;
  --block->alive;
  --block->warps[warp].alive;
  release(warp);
  leave(State::done);
}

// The stacks of a block's threads. Blocks that have ended leave theirs to later ones: to map them
// again takes longer than most kernels.
std::mutex stacks_mutex;
std::vector<std::byte*> unused_stacks;

std::byte* take_stacks() {
  const std::lock_guard lock(stacks_mutex);
  if (unused_stacks.empty()) {
    return static_cast<std::byte*>(mmap(nullptr, kStack * kMostThreads, PROT_READ | PROT_WRITE,
                                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  }
  std::byte* const stacks = unused_stacks.back();
  unused_stacks.pop_back();
  return stacks;
}

void leave_stacks(std::byte* stacks) {
  const std::lock_guard lock(stacks_mutex);
  unused_stacks.push_back(stacks);
}

void prepare(Block& to, std::byte* stacks, unsigned threads) {
  to.alive = threads;
  to.warps.resize(threads / kWarp);
  for (unsigned i = 0; i < threads; ++i) {
    auto** top = reinterpret_cast<void**>(stacks + kStack * (i + 1) - 64);
    *--top = nullptr;  // return address of body()
    *--top = reinterpret_cast<void*>(&body);
    to.fibers.push_back({top - 6, State::ready});
  }
}

// Runs each thread that is ready once, in a new order. Returns true if any of them could run.
bool take_turns(std::vector<unsigned>& order, std::mt19937& random) {
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
    thread_index = dim3(i);
    pycomm_switch_stacks(&block->scheduler, block->fibers[i].stack);
  }
  if (!ran) block->asleep = 0;
  return ran || slept;
}

void run(Block& to, unsigned index, dim3 grid, dim3 threads) {
  block = &to;
  block_index = dim3(index);
  block_size = threads;
  grid_size = grid;
  std::byte* const stacks = take_stacks();
  prepare(to, stacks, threads.x);
  std::mt19937 random(std::random_device{}());
  std::vector<unsigned> order(threads.x);
  std::iota(order.begin(), order.end(), 0u);
  while (to.alive > 0) {
    const bool ran = take_turns(order, random);
    if (to.alive > 0 && to.arrived == to.alive) {
      to.result = to.vote;
      to.vote = false;
      to.arrived = 0;
      for (Fiber& fiber : to.fibers) {
        if (fiber.state == State::at_block) fiber.state = State::ready;
      }
    } else if (!ran) {
      std::fprintf(stderr, "threads of a block wait for each other at different barriers\n");
      std::abort();
    } else {
      sched_yield();  // they may wait for another block
    }
  }
  leave_stacks(stacks);
}

std::mutex loaded_mutex;  // guards the kernels that are loaded, and how many launched ones were not
std::set<const void*> loaded;
int unloaded = 0;

// The bytes between an address on this thread's stack and the stack's end.
std::size_t stack_above(const void* address) {
  pthread_attr_t attributes;
  void* begin = nullptr;
  std::size_t bytes = 0;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &begin, &bytes);
  pthread_attr_destroy(&attributes);
  return static_cast<std::size_t>(static_cast<std::byte*>(begin) + bytes -
                                  static_cast<const std::byte*>(address));
}

}  // namespace

void pause() { leave(State::ready); }

bool meet(bool vote) {
  block->vote |= vote;
  ++block->arrived;
  leave(State::at_block);
  return block->result;
}

const std::uint64_t* exchange(std::uint64_t value) {
  const unsigned warp = thread_index.x / kWarp;
  Warp& meeting = block->warps[warp];
  std::uint64_t* const values = meeting.values[meeting.round % 2];
  values[thread_index.x % kWarp] = value;
  ++meeting.arrived;
  block->fibers[block->current].state = State::at_warp;
  release(warp);
  leave(block->fibers[block->current].state);
  return values;
}

int launch(const void* kernel, dim3 grid, dim3 threads, void** arguments, Stream* stream) {
  {
    const std::lock_guard lock(loaded_mutex);
    if (!loaded.contains(kernel)) ++unloaded;
  }
  Arguments copy;
  std::memcpy(&copy, arguments[0], std::min(sizeof(copy), stack_above(arguments[0])));
  enqueue(stream, [=] {
    std::vector<Block> blocks(grid.x);
    std::vector<std::thread> running;
    for (unsigned i = 0; i < grid.x; ++i) {
      blocks[i].kernel = reinterpret_cast<Kernel>(const_cast<void*>(kernel));
      blocks[i].arguments = &copy;
      running.emplace_back([&, i] { run(blocks[i], i, grid, threads); });
    }
    for (std::thread& thread : running) thread.join();
  });
  return cudaSuccess;
}

int unloaded_launches() {
  const std::lock_guard lock(loaded_mutex);
  return unloaded;
}

}  // namespace device

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void* kernel) {
  const std::lock_guard lock(device::loaded_mutex);
  device::loaded.insert(kernel);
  return cudaSuccess;
}
