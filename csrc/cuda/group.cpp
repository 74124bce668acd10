#include "cuda/group.h"

#include <algorithm>
#include <chrono>

#include "core/algorithms/select.h"

namespace pycomm::cuda {
namespace {

constexpr auto kLookEvery = std::chrono::milliseconds(5);

}  // namespace

Group::Group(std::shared_ptr<cpu::Group> host, std::shared_ptr<Endpoint> endpoint,
             std::shared_ptr<SharedLaunch> shared, void (*interrupt)())
    : host_(std::move(host)),
      endpoint_(std::move(endpoint)),
      shared_(std::move(shared)),
      interrupt_(interrupt) {
  host_->send_on_device();
  watcher_ = cpu::start_thread([this] { watch(); });
  host_->kernels_begin();
}

Group::~Group() {
  if (!watcher_.joinable()) return;
  try {
    endpoint_->synchronize();
  } catch (const std::exception&) {  // the device has failed
  }
  stop_watching();
}

void Group::run(const Call& call, std::uintptr_t stream, const Sharding& sharding) {
  const std::lock_guard lock(running_);
  host_->check_usable();
  check();
  enqueue({admit(call), call.input, call.output}, stream, sharding);
}

void Group::run(const std::vector<Call>& calls, std::uintptr_t stream, Bucket bucket) {
  const std::lock_guard lock(running_);
  host_->check_usable();
  check();
  std::vector<Part> parts;
  for (const Call& call : calls) {
    parts.push_back({admit(call), call.input, call.output, call.feedback});
  }
  for (auto begin = parts.begin(); begin != parts.end();) {
    const Part first = *begin;
    auto end = begin + 1;
    if (first.operation.codec.kind == CodecKind::none) {
      enqueue(first, stream, {});
    } else {
      end = std::stable_partition(end, parts.end(), [&](const Part& part) {
        return share_launches(first.operation, part.operation);
      });
      bucket.parts.assign(begin, end);
      for (; !endpoint_->fits(bucket.parts); --end) bucket.parts.pop_back();
      enqueue({whole_of(bucket.parts), first.input, first.output}, stream, bucket);
    }
    begin = end;
  }
}

Operation Group::admit(const Call& call) const {
  PYCOMM_CHECK(!call.inputs && !call.outputs,
               "on CUDA, blocks must have equal sizes and follow each other in one tensor");
  PYCOMM_CHECK(call.timeout == 0, "on CUDA, operations have the timeout of the group");
  PYCOMM_CHECK(call.operation.codec.kind == CodecKind::none ||
                   call.operation.collective == Collective::all_reduce,
               "on CUDA, only all_reduce is compressed");
  const std::string why = refusal_of(call, host_->size());
  PYCOMM_CHECK(why.empty(), why);
  Operation operation = call.operation;
  operation.device = Device::cuda;
  operation.details = hash_of(details_of(call, host_->size()));
  operation.algorithm = resolve(operation, host_->size());
  endpoint_->check(operation, call.input);
  return operation;
}

void Group::enqueue(const Part& part, std::uintptr_t stream, Extras extras) {
  try {
    extras.capture = endpoint_->capture_of(stream);
    extras.number = host_->record_launch(part.operation, extras.capture.has_value());
    if (shared_ == nullptr) {
      endpoint_->launch(part.operation, part.input, part.output, stream, extras);
    } else {
      run_together(part, stream, extras);
    }
  } catch (const CollectiveError&) {
    throw;
  } catch (...) {
    host_->abort();  // peers must not wait for this operation
    host_->comm().wait_for_kernels(cpu::kRetreatWithin);
    throw;
  }
}

void Group::check() {
  if (!closed_) host_->check_usable();
  Failure found = endpoint_->failure();
  report(found);
  const std::uint64_t word = host_->abort_word();
  if (found.reason == Reason::none && word == 0) return;
  // After a mismatch no rank has touched a tensor, so the group is not aborted.
  if (word != 0) {
    host_->comm().wait_for_kernels(host_->comm().patience(), interrupt_);
    found = endpoint_->failure();  // now it also tells which operation failed
  }
  host_->show_progress(endpoint_->progress());
  const CollectiveError error = host_->with_report(describe_failure(found, word), found.number);
  host_->fail(error.what());
  throw error;
}

void Group::close() {
  if (host_->forked()) return;
  endpoint_->synchronize();
  closed_ = true;
  host_->show_progress(endpoint_->progress());
  stop_watching();
}

// Tells the other ranks. Every rank sees a mismatch itself.
void Group::report(const Failure& found) {
  if (found.reason == Reason::none || found.reason == Reason::mismatch) return;
  host_->abort(found.abort_word);
}

CollectiveError Group::describe_failure(const Failure& found, std::uint64_t word) const {
  if (found.reason == Reason::mismatch) {
    const int pid = host_->pid(found.rank);
    return mismatch(0, found.first, found.rank, found.other, pid, found.number);
  }
  if (!is_abort_word(word, host_->size())) return overwritten(found.first, found.number);
  const int rank = rank_of(word), pid = host_->pid(rank);
  const Reason reason = reason_of(word);
  const std::string what = reason == Reason::timeout
                               ? timeout_text(word, rank == host_->rank(), pid)
                               : failure_text(reason, rank, pid);
  if (found.reason != Reason::none)
    return ended(reason, rank, pid, what, found.first, found.number);
  return {reason, rank, pid, "", 0, what + ", when no operation of this rank ran on its device"};
}

// Rank 0 launches for all ranks.
void Group::run_together(const Part& part, std::uintptr_t stream, const Extras& extras) {
  const int rank = host_->rank();
  shared_->put(rank, part.operation, part.input, part.output, stream, extras);
  try {
    host_->agree(part.operation, interrupt_);
    if (rank == 0) shared_->launch([this] { return host_->abort_word() != 0; });
    host_->agree({.device = Device::cuda}, interrupt_);  // a barrier: it has been launched
  } catch (...) {
    host_->abort();
    shared_->follow(rank);  // if it has been launched, it uses this rank's tensors
    throw;
  }
  shared_->follow(rank);
}

// Passes aborts and deaths to running kernels, and kernels' failures and progress to the host's group.
void Group::watch() {
  std::unique_lock lock(mutex_);
  while (!stopping_.wait_for(lock, kLookEvery, [&] { return stop_; })) {
    host_->show_progress(endpoint_->progress());
    count_ended();
    report(endpoint_->failure());
    for (int r = 0; r < host_->size(); ++r) {
      if (r != host_->rank() && host_->gone(r)) endpoint_->set_gone(r);
    }
    if (const std::uint64_t word = host_->abort_word()) {
      endpoint_->set_abort(word);
      if (!endpoint_->in_peers_heaps()) host_->kernels_ended();
    }
  }
}

// After the last kernel has ended.
void Group::stop_watching() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stopping_.notify_all();
  if (watcher_.joinable()) watcher_.join();
  count_ended();
  host_->kernels_ended();
}

// One thread at a time.
void Group::count_ended() {
  while (const std::optional<TimedOperation> ended = endpoint_->next_timed()) {
    host_->count_on_device(*ended);
  }
}

}  // namespace pycomm::cuda
