// What torch.distributed calls a Work: an operation that runs or has run.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <vector>

#include "c10d/connection.h"
#include "c10d/future.h"
#include "c10d/request.h"

namespace pycomm::c10d {

class Work : public ::c10d::Work {
 public:
  Work(std::shared_ptr<Connection> connection, OpType type, const char* title,
       const Tensors& inputs);

  // Blocks until the operation is complete, and throws its error. With a timeout, throws
  // c10::DistBackendError when it is over; the operation goes on.
  bool wait(Milliseconds timeout) override;
  void abort() override { native().abort(connection_->group()); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_.get(); }

 protected:
  // Waits until the operation is complete, for at most `patience`.
  virtual void await(Milliseconds patience);
  void complete(const Tensors& value, const std::exception_ptr& error);

  const std::shared_ptr<Connection> connection_;

 private:
  const char* const title_;
  LazyFuture future_;
};

// The calls of a collective.
class CollectiveWork final : public Work {
 public:
  CollectiveWork(std::shared_ptr<Connection> connection, Request request);

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
  // `type` is SEND, RECV or RECVANYSOURCE.
  MessageWork(std::shared_ptr<Connection> connection, OpType type, const at::Tensor& tensor);
  ~MessageWork() override;

  // `peer` is the other rank, or kAnySource.
  static void start(const c10::intrusive_ptr<MessageWork>& work, int peer, int tag,
                    Milliseconds timeout);

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
  const at::Tensor dense_;  // shares its memory, or is a contiguous stand-in
  const bool receives_;
  // Guarded by mutex_. The message may end before its request is known here.
  void* request_ = nullptr;
  bool ended_ = false;
};

}  // namespace pycomm::c10d
