// What torch.distributed calls a Work: an operation that runs or has run.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "c10d/connection.h"
#include "c10d/future.h"
#include "c10d/request.h"
#include "c10d/stream_order.h"

namespace pycomm::c10d {

// For synchronize(), which torch calls with the GIL. Operations need it between nodes, and to fail.
inline void wait_without_gil(::c10d::Work& work) {
  const WithoutGil no_gil;
  work.wait(kNoTimeout);
}

// An operation that the host runs.
class Work : public ::c10d::Work {
 public:
  // `order`: of tensors on a device, whose stand-ins the operation uses.
  Work(std::shared_ptr<Connection> connection, OpType type, const char* title,
       const Tensors& inputs, std::optional<StreamOrder> order);

  // Blocks until the operation is complete, and throws its error. With a timeout, throws
  // c10::DistBackendError when it is over; the operation goes on.
  bool wait(Milliseconds timeout) override;
  void synchronize() override { wait_without_gil(*this); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  void abort() override { native().abort(connection_->group()); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_.get(); }

 protected:
  // Waits until the operation is complete, for at most `patience`.
  virtual void await(Milliseconds patience);
  void complete(const Tensors& value, const std::exception_ptr& error);

  const std::shared_ptr<Connection> connection_;
  std::optional<StreamOrder> order_;

 private:
  const char* const title_;
  LazyFuture future_;
};

// The calls of a collective.
class CollectiveWork final : public Work {
 public:
  CollectiveWork(std::shared_ptr<Connection> connection, Request request,
                 std::optional<StreamOrder> order);

  // Runs the calls on this thread. Throws their error.
  void run();
  // Runs the calls on the group's worker, after those submitted before.
  static void submit(const c10::intrusive_ptr<CollectiveWork>& work);

  Tensors result() override { return request_.outputs; }

 private:
  static void completed(void* context, Error error);
  void finish_request(std::exception_ptr error);

  Request request_;
};

// A send or a receive.
class MessageWork final : public Work {
 public:
  // `type` is SEND, RECV or RECVANYSOURCE; `peer` is the other rank, or kAnySource.
  MessageWork(std::shared_ptr<Connection> connection, OpType type, const at::Tensor& tensor,
              int peer, std::optional<StreamOrder> order);
  ~MessageWork() override;

  // True if the tensor is on a device and goes through host memory.
  bool is_staged() const { return tensor_.is_cuda() && !on_device_.defined(); }
  static void start(const c10::intrusive_ptr<MessageWork>& work, int tag, Milliseconds timeout);

  bool wait(Milliseconds timeout) override;
  int sourceRank() const override { return native().source_of(request_); }
  Tensors result() override { return {tensor_}; }

 protected:
  // This thread drives the group's messages meanwhile.
  void await(Milliseconds patience) override;

 private:
  static void completed(void* context);
  void finish_message();

  const at::Tensor tensor_;
  const int peer_;
  const bool receives_;
  // Contiguous memory on the tensor's device, if the message can stay on devices, and in host memory.
  // They share the tensor's, or stand in for it.
  at::Tensor on_device_;
  at::Tensor on_host_;
  // Guarded by mutex_. The message may end before its request is known here.
  void* request_ = nullptr;
  bool ended_ = false;
};

// Several works as one.
class CoalescedWork final : public ::c10d::Work {
 public:
  explicit CoalescedWork(std::vector<c10::intrusive_ptr<::c10d::Work>> works)
      : works_(std::move(works)) {}

  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(),
                       [](auto& work) { return work->isCompleted(); });
  }
  bool wait(Milliseconds timeout) override {
    for (auto& work : works_) work->wait(timeout);
    return true;
  }
  void synchronize() override { wait_without_gil(*this); }
  void blockCurrentStream() override { wait(kNoTimeout); }

 private:
  std::vector<c10::intrusive_ptr<::c10d::Work>> works_;
};

// A collective that kernels run. It is complete when they have run, and the host waits for them only
// if a timeout is given. They use the tensors until then, also if nobody waits for this.
class KernelWork final : public ::c10d::Work {
 public:
  KernelWork(std::shared_ptr<Connection> connection, Request request, StreamOrder order);
  ~KernelWork() override;

  // Enqueues the calls. Throws the error of earlier kernels, which has ended the group.
  void enqueue();

  bool isCompleted() override { return native().has_passed(order_.done()); }
  // Later work of the current stream waits for the operation. Throws as enqueue().
  bool wait(Milliseconds timeout) override;
  void synchronize() override { wait_without_gil(*this); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  void abort() override { native().abort(connection_->group()); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_.get(); }
  Tensors result() override { return request_.outputs; }

 private:
  void await(Milliseconds timeout);
  // Gives up the tensors. `is_ordered`: the stream of the caller waits for the operation.
  void release(bool is_ordered);

  const std::shared_ptr<Connection> connection_;
  void* const side_;
  Request request_;
  StreamOrder order_;
  bool released_ = false;  // guarded by mutex_
  LazyFuture future_;
};

}  // namespace pycomm::c10d
