// What torch.distributed calls a Work: an operation that runs or has run.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <vector>

#include "c10d/connection.h"
#include "c10d/request.h"

namespace pycomm::c10d {

class Work final : public ::c10d::Work {
 public:
  Work(std::shared_ptr<Connection> connection, Request request);

  // Runs the calls on this thread. Throws their error.
  void run();
  // Runs the calls on the group's worker, after those submitted before.
  static void submit(const c10::intrusive_ptr<Work>& work);

  // Blocks until the operation is complete, and throws its error. With a timeout, throws
  // c10::DistBackendError when it is over; the operation goes on.
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override { native().abort(connection_->group()); }
  std::vector<at::Tensor> result() override { return request_.outputs; }
  // Its value is the list of output tensors.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  static void completed(void* context, Error error);
  void complete(std::exception_ptr error);

  const std::shared_ptr<Connection> connection_;
  Request request_;
  // Guarded by mutex_: the future, if anyone has asked for it, and whether it is being completed.
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool told_ = false;
};

}  // namespace pycomm::c10d
