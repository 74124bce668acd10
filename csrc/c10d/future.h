// The future of an operation, which exists only if someone has asked for it.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Stream.h>

#include <exception>
#include <mutex>
#include <optional>
#include <vector>

namespace pycomm::c10d {

class LazyFuture {
 public:
  // `stream`: the operation's, if its tensors lie on a device. Users' streams then wait for it.
  explicit LazyFuture(std::optional<c10::Stream> stream) : stream_(stream) {}
  // The future; its value is a list of tensors. Throws std::system_error if no thread can start that
  // would complete it.
  c10::intrusive_ptr<c10::ivalue::Future> get();
  // Waits until the future, if there is one, is complete; not for its callbacks. The operation has
  // ended.
  void await();
  // The operation has ended. Called once.
  void complete(const std::vector<at::Tensor>& value, std::exception_ptr error);

 private:
  const std::optional<c10::Stream> stream_;
  std::mutex mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool completed_ = false;
  std::vector<at::Tensor> value_;
  std::exception_ptr error_;
};

}  // namespace pycomm::c10d
