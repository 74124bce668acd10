// The future of an operation, which exists only if someone has asked for it.
#pragma once

#include <ATen/core/ivalue.h>

#include <exception>
#include <mutex>
#include <vector>

namespace pycomm::c10d {

class LazyFuture {
 public:
  // The future; its value is a list of tensors. Throws std::system_error if no thread can start that
  // would complete it.
  c10::intrusive_ptr<c10::ivalue::Future> get();
  // Waits until the future, if there is one, is complete; not for its callbacks. The operation has
  // ended.
  void await();
  // The operation has ended. Called once.
  void complete(const std::vector<at::Tensor>& value, std::exception_ptr error);

 private:
  std::mutex mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool completed_ = false;
  std::vector<at::Tensor> value_;
  std::exception_ptr error_;
};

}  // namespace pycomm::c10d
