#include "cpu/group/group.h"

#include <cstring>
#include <system_error>

#include "core/algorithms/run.h"
#include "core/codecs/cast.h"
#include "cpu/executor/blocks.h"
#include "cpu/executor/custom_operation.h"
#include "cpu/executor/threads.h"
#include "cpu/executor/waiting.h"
#include "cpu/group/fork.h"
#include "cpu/memory/huge_pages.h"

namespace pycomm::cpu {
Group::Group(std::shared_ptr<Window> window, std::shared_ptr<const Liveness> peers, int rank,
             int size, int cores, Clock::duration timeout, std::uint32_t first_epoch)
    : rank_(peers->number(rank)),
      size_(size),
      forks_(current_forks()),
      window_(std::move(window)),
      heap_(window_->heap(rank)),
      comm_(window_, std::move(peers), rank, size, cores, timeout, first_epoch) {}

void Group::span(Nodes nodes, std::shared_ptr<Transport> transport, std::shared_ptr<p2p::Port> port,
                 Clock::duration timeout, std::vector<AlgorithmRow> algorithms) {
  size_ = nodes.world();
  algorithms_ = std::move(algorithms);
  comm_.span(nodes.stripes(), [this] { return internode_->other_nodes(); });
  internode_ =
      std::make_unique<InternodeGroup>(comm_, std::move(nodes), std::move(transport), timeout);
  port_ = std::move(port);
  engine();  // now, because it needs a descriptor, and tells other nodes that this rank leaves
}

Group::~Group() { close(); }

bool Group::forked() const { return forks_ != current_forks(); }

bool Group::collectives_idle() {
  if (forked()) return true;
  if (pending_.load(std::memory_order_acquire) != 0) return false;
  const std::unique_lock lock(running_, std::try_to_lock);
  return lock.owns_lock();
}

void Group::wait_until_idle(void (*interrupt)()) {
  for (Clock::time_point look_at = Clock::now() + kInterruptEvery;
       interrupt && !collectives_idle();) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (Clock::now() < look_at) continue;
    interrupt();
    look_at = Clock::now() + kInterruptEvery;
  }
}

void Group::check_usable() {
  if (forked()) {
    throw GroupUnusable("group belongs to the parent of this forked process; make a new one here");
  }
  if (closed_.load(std::memory_order_acquire)) throw GroupUnusable("group is closed");
  if (failed_.load(std::memory_order_acquire)) {
    const std::lock_guard lock(failure_mutex_);
    if (!told_->exchange(true)) std::rethrow_exception(error_);
    throw GroupUnusable("group has failed and must be made anew; the failure was: " + failure_);
  }
}

bool Group::run(const Call& call, void (*interrupt)()) {
  check_fits(call);
  return run_in_order({.calls = {&call, 1}, .subject = subject_number()}, interrupt);
}

void Group::agree(const Operation& operation, void (*interrupt)()) {
  const Call call{operation};
  run_in_order({.calls = {&call, 1}, .agree_only = true, .subject = subject_number()}, interrupt);
}

bool Group::should_commit(bool ready, void (*interrupt)()) {
  PYCOMM_CHECK(internode_ == nullptr, "a group that spans nodes cannot decide");
  Decision decision(ready, decisions_);
  try {
    run(decision.call(), interrupt);
  } catch (const CollectiveError&) {
    if (decision.outcome() == Outcome::failed || decision.outcome() == Outcome::none) throw;
    raise_again();
  }
  return decision.outcome() == Outcome::yes;
}

std::shared_ptr<Work> Group::submit(std::vector<Call> calls, Completion completion) {
  check_usable();
  for (const Call& call : calls) check_fits(call);
  return enqueue({.calls = calls,
                  .owned = std::move(calls),
                  .completion = completion,
                  .subject = subject_number()});
}

// Runs a task on this thread, unless submitted work is still pending.
bool Group::run_in_order(const Task& task, void (*interrupt)()) {
  check_usable();
  if (pending_.load(std::memory_order_acquire) == 0) {
    const std::lock_guard lock(running_);
    if (closed_) check_usable();  // closed while this thread waited for the lock
    try {
      const bool nonfinite = execute(task, interrupt);
      comm_.recorder().count_blocked();
      return nonfinite;
    } catch (...) {
      *told_ = true;
      throw;
    }
  }
  const std::shared_ptr<Work> work = enqueue(task);
  work->wait(interrupt);
  return work->nonfinite();
}

std::shared_ptr<Work> Group::enqueue(Task task) {
  task.work = std::make_shared<Work>(*this);
  task.enqueued = ticks();
  const std::lock_guard lock(queue_mutex_);
  if (closed_) check_usable();  // nobody would join a worker that starts now
  if (!worker_.joinable()) worker_ = start_thread([this] { serve(); });
  pending_.fetch_add(1, std::memory_order_acq_rel);
  std::shared_ptr<Work> work = task.work;
  queue_.push_back(std::move(task));
  queue_changed_.notify_one();
  return work;
}

void Group::serve() {
  while (true) {
    std::unique_lock lock(queue_mutex_);
    queue_changed_.wait(lock, [&] { return !queue_.empty() || closed_; });
    if (queue_.empty()) return;
    const Task task = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();

    std::exception_ptr error;
    bool nonfinite = false;
    std::int64_t moved = 0;
    const Clock::time_point begin = Clock::now();
    try {
      const std::lock_guard running(running_);
      rethrow_failure();
      comm_.recorder().count_blocked(task.enqueued, task.enqueued);
      nonfinite = execute(task, nullptr, &moved);
      if (const std::int64_t since = task.work->awaited_since()) {
        comm_.recorder().count_blocked(since, ticks());
      }
    } catch (...) {
      error = std::current_exception();
    }
    // Before the work completes, so that a thread that has waited for it can run the next operation
    // inline.
    pending_.fetch_sub(1, std::memory_order_acq_rel);
    task.work->complete(nonfinite, error, {begin, Clock::now()}, moved);
    if (task.completion.function != nullptr) {
      task.completion.function(task.completion.context, std::move(error));
    }
  }
}

bool Group::execute(const Task& task, void (*interrupt)(), std::int64_t* moved) {
  bool nonfinite = false;
  drop_copy_for_children();  // the next one would differ: operations write to tensors
  comm_.recorder().set_subject(task.subject);
  for (const Call& call : task.calls) snapshot_residuals(call, size_);
  try {
    for (const Call& call : task.calls) {
      nonfinite |= execute(call, task.agree_only, interrupt);
      if (moved != nullptr) *moved += bytes_moved();
    }
  } catch (...) {
    // The results are lost, so the residuals that were sent for them are restored.
    for (const Call& call : task.calls) put_back(call, size_);
    throw;
  }
  return nonfinite;
}

std::int64_t Group::bytes_moved() const {
  if (internode_ != nullptr) return internode_->traffic().received;
  return comm_.traffic().bytes_in + comm_.traffic().bytes_out;
}

bool Group::execute(const Call& call, bool agree_only, void (*interrupt)()) {
  if (failed_.load(std::memory_order_acquire)) check_usable();
  Operation operation = call.operation;
  const int nodes = internode_ == nullptr ? 1 : internode_->nodes().count();
  operation.algorithm = resolve(operation, size_, nodes, algorithms_);
  const Details* details = &call.details;
  const bool compresses = operation.codec.kind != CodecKind::none && !agree_only;
  const bool in_blocks = call.inputs || call.outputs;
  if (compresses || in_blocks) {
    all_details_ = details_of(call, size_);
    details = &all_details_;
    const float* const scale = call.feedback.scale;
    if (scale != nullptr && call.feedback.residual != nullptr) all_details_.scale = *scale;
  }
  if (!agree_only) operation.details = hash_of(*details);
  comm_.set_details(details);
  comm_.set_timeout(call.timeout);
  if (call.output != call.input && !agree_only) prepare_output_of(operation, call);
  try {
    bool nonfinite = false;
    if (call.body != nullptr) {
      comm_.begin(operation, call.input, call.output, interrupt, call.body->preflight());
      call.body->run(comm_);
    } else if (internode_ != nullptr) {
      set_count(operation, call, size_);
      nonfinite = internode_->run(operation, call, interrupt, p2p_.get());
    } else if (compresses) {
      nonfinite = operation.codec.kind == CodecKind::topk ? run_topk(operation, call, interrupt)
                                                          : run_blocks(operation, call, interrupt);
    } else if (in_blocks) {
      run_in_blocks(comm_, operation, call, interrupt);
    } else {
      run_plain(operation, call, agree_only, interrupt);
    }
    comm_.finish();
    return nonfinite;
  } catch (const CollectiveError& error) {
    const std::uint64_t word = pycomm::abort_word(error.reason, error.rank);
    comm_.abort(word);
    retreat(call);
    const std::uint64_t decided_word = comm_.decided_word();
    const CollectiveError told =
        comm_.with_report(decided_word == word ? error : comm_.failure_of(decided_word));
    fail(told);
    throw told;
  } catch (const std::exception& error) {
    abort();  // the other ranks do not know of it yet
    retreat(call);
    const CollectiveError told = comm_.failure_of(comm_.decided_word());
    fail(comm_.with_report(told.rank == rank_ ? told.because(error.what()) : told));
    throw;
  }
}

[[gnu::noinline]] void Group::prepare_output_of(const Operation& operation, const Call& call) {
  if (call.output == nullptr || call.outputs || call.body != nullptr) return;
  const auto address = reinterpret_cast<std::uintptr_t>(call.output);
  if (offset_of(address) != kNotInWindow) return;
  prepare_output(call.output, output_bytes(operation, size_, rank_));
}

// After a failure: returns when no rank uses the caller's memory any more.
void Group::retreat(const Call& call) {
  comm_.leave_peers_heaps();
  if (internode_ != nullptr) internode_->stop();
  comm_.retreat();
  comm_.wait_for_kernels(kRetreatWithin);
  if (call.body != nullptr) call.body->note_failure(comm_);
}

void Group::run_plain(const Operation& operation, const Call& call, bool agree_only,
                      void (*interrupt)()) {
  comm_.begin(operation, call.input, call.output, interrupt);
  if (size_ > 1) return agree_only ? barrier(comm_) : pycomm::run(comm_, operation);
  if (agree_only) return;
  const std::int64_t bytes = operation.count * size_of(operation.dtype);
  if (call.input != call.output && bytes > 0) {
    std::memcpy(call.output, call.input, static_cast<std::size_t>(bytes));
  }
}

// A group of one rank compresses, too, so that it shows the effect of compression in larger groups.
bool Group::run_blocks(const Operation& operation, const Call& call, void (*interrupt)()) {
  const float limit = largest_safe(operation, size_);
  const Range whole{0, reduced_elements(operation, size_)};
  const Preflight preflight = preflight_of(operation, call, limit, {&whole, 1});
  comm_.begin(operation, call.input, call.output, interrupt, preflight);
  const auto staging = CodedStaging::in(comm_.slot_bytes() * kStagingSlots, operation.codec);
  CodedComm<Comm> coded(comm_, operation, call.feedback, limit, staging,
                        codec_loops(operation.dtype, operation.codec));
  run_coded(coded, operation);
  // In a reduce-scatter, a rank sees only its own contribution and its own result. With feedback, the
  // preflight has already told all ranks.
  if (operation.collective == Collective::all_reduce || call.feedback.residual != nullptr) {
    return coded.nonfinite();
  }
  Preflight found;
  found.nonfinite = static_cast<std::uint8_t>(coded.nonfinite());
  comm_.begin_phase(comm_.called(), nullptr, nullptr, found);
  comm_.announce();
  return comm_.preflight().nonfinite != 0;
}

bool Group::run_topk(const Operation& operation, const Call& call, void (*interrupt)()) {
  if (topk_ == nullptr) topk_ = std::make_unique<TopkWorkspace>(heap_);
  TopkComm<Comm> coded(comm_, *topk_, operation, call, largest_safe(operation, size_));
  const std::uint32_t sequence = next_sequence(comm_.sequence());
  std::byte* const area = topk_->area(sequence, coded.area_bytes(comm_.rank()));
  comm_.begin(operation, area, area, interrupt, coded.preflight());
  topk_exchange(coded);
  return coded.nonfinite();
}

p2p::Engine& Group::p2p() {
  check_usable();
  p2p::Engine& made = engine();
  if (closed_) check_usable();  // nobody would close it
  return made;
}

// The engine, which is made at the first call; in a group that spans nodes, by span().
p2p::Engine& Group::engine() {
  const std::lock_guard lock(p2p_mutex_);
  if (p2p_ != nullptr) return *p2p_;
  std::optional<p2p::OtherNodes> others;
  if (port_ != nullptr) others.emplace(internode_->nodes(), *port_, [this] { internode_->stop(); });
  p2p_ = std::make_unique<p2p::Engine>(
      *window_, comm_, told_, [this](const CollectiveError& error) { fail(error); }, others);
  return *p2p_;
}

bool Group::p2p_idle() {
  const std::lock_guard lock(p2p_mutex_);
  return p2p_ == nullptr || p2p_->idle();
}

bool Group::reaches(int device, int peer, std::int64_t bytes) {
  const std::lock_guard lock(p2p_mutex_);
  return p2p_ != nullptr && p2p_->reaches(device, peer, bytes);
}

bool Group::p2p_awaits(int rank) {
  const std::lock_guard lock(p2p_mutex_);
  return p2p_ != nullptr && p2p_->awaits(rank);
}

void Group::trim(void (*interrupt)()) {
  check_usable();
  running_.check_not_held();
  wait_until_idle(interrupt);
  const std::lock_guard lock(running_);
  check_usable();  // in a failed group, peers may still read the buffers
  if (topk_ != nullptr) topk_->trim(comm_.sequence());
  if (internode_ != nullptr) internode_->trim();
}

}  // namespace pycomm::cpu
