#include "c10d/future.h"

#include <c10/core/StreamGuard.h>

#include "c10d/completer.h"

namespace pycomm::c10d {
namespace {

void set(c10::ivalue::Future& future, const std::vector<at::Tensor>& value,
         const std::exception_ptr& error, std::optional<c10::Stream> stream) {
  c10::OptionalStreamGuard guard;
  if (stream) guard.reset_stream(*stream);
  if (error != nullptr) {
    future.setError(error);
  } else {
    future.markCompleted(c10::IValue(value));
  }
}

}  // namespace

c10::intrusive_ptr<c10::ivalue::Future> LazyFuture::get() {
  const std::lock_guard lock(mutex_);
  if (future_ == nullptr) {
    if (!completed_) prepare_to_complete();
    const auto type = c10::ListType::create(c10::TensorType::get());
    std::vector<c10::Device> devices;
    if (stream_) devices.push_back(stream_->device());
    future_ = c10::make_intrusive<c10::ivalue::Future>(type, devices);
    if (completed_) set(*future_, value_, error_, stream_);
  }
  return future_;
}

void LazyFuture::await() {
  std::unique_lock lock(mutex_);
  const c10::intrusive_ptr<c10::ivalue::Future> future = future_;
  lock.unlock();
  if (future != nullptr) future->wait();
}

void LazyFuture::complete(const std::vector<at::Tensor>& value, std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  completed_ = true;
  value_ = value;
  error_ = std::move(error);
  if (future_ == nullptr) return;
  complete_elsewhere([future = future_, value = value_, error = error_, stream = stream_] {
    set(*future, value, error, stream);
  });
}

}  // namespace pycomm::c10d
