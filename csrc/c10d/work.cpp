#include "c10d/work.h"

#include <ATen/core/ivalue.h>

#include "c10d/completer.h"
#include "c10d/connection.h"

namespace pycomm::c10d {
namespace {

constexpr std::chrono::milliseconds kInterruptEvery(50);

void set(c10::ivalue::Future& future, const std::vector<at::Tensor>& value,
         const std::exception_ptr& error) {
  if (error != nullptr) {
    future.setError(error);
  } else {
    future.markCompleted(c10::IValue(value));
  }
}

}  // namespace

Work::Work(std::shared_ptr<Connection> connection, Request request)
    : ::c10d::Work(connection->rank(), request.type, request.title, request.inputs),
      connection_(std::move(connection)),
      request_(std::move(request)) {}

void Work::run() {
  const Error error =
      native().run(connection_->group(), request_.calls.data(), request_.calls.size());
  complete(error == nullptr ? nullptr : as_exception(error));
  if (exception_ != nullptr) std::rethrow_exception(exception_);
}

void Work::submit(const c10::intrusive_ptr<Work>& work) {
  auto reference = std::make_unique<c10::intrusive_ptr<Work>>(work);
  const std::vector<Call>& calls = work->request_.calls;
  check(native().submit(work->connection_->group(), calls.data(), calls.size(), &Work::completed,
                        reference.get()));
  reference.release();
}

void Work::completed(void* context, Error error) {
  const std::unique_ptr<c10::intrusive_ptr<Work>> work(
      static_cast<c10::intrusive_ptr<Work>*>(context));
  (*work)->complete(error == nullptr ? nullptr : as_exception(error));
}

void Work::complete(std::exception_ptr error) {
  try {
    if (error == nullptr) request_.finish();
  } catch (...) {
    error = std::current_exception();
  }
  finish(error);
  const std::lock_guard lock(mutex_);
  if (future_ == nullptr || told_) return;
  told_ = true;
  complete_elsewhere(
      [future = future_, value = request_.outputs, error] { set(*future, value, error); });
}

bool Work::wait(std::chrono::milliseconds timeout) {
  const auto start = std::chrono::steady_clock::now();
  std::unique_lock lock(mutex_);
  while (!cv_.wait_for(lock, kInterruptEvery, [&] { return completed_; })) {
    lock.unlock();
    if (const Error error = native().check_signals(); error != nullptr) {
      abort();
      check(error);
    }
    if (timeout != kNoTimeout && std::chrono::steady_clock::now() - start > timeout) {
      C10_THROW_ERROR(DistBackendError, std::string(request_.title) + " is not complete after " +
                                            std::to_string(timeout.count()) + " ms (Timed out)");
    }
    lock.lock();
  }
  if (exception_ != nullptr) std::rethrow_exception(exception_);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> Work::getFuture() {
  const std::lock_guard lock(mutex_);
  if (future_ == nullptr) {
    future_ =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    told_ = completed_;
    if (completed_) set(*future_, request_.outputs, exception_);
  }
  return future_;
}

}  // namespace pycomm::c10d
