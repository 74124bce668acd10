#include "c10d/work.h"

#include "c10d/completer.h"

namespace pycomm::c10d {
namespace {

constexpr Milliseconds kInterruptEvery(50);

// What a function of pycomm._C holds until the operation has ended.
template <class T>
struct Reference {
  const Completing completing = {};
  const c10::intrusive_ptr<T> work;
};
template <class T>
using Owner = std::unique_ptr<Reference<T>>;

template <class T>
Owner<T> reference_to(const c10::intrusive_ptr<T>& work) {
  return Owner<T>(new Reference<T>{.work = work});
}

template <class T>
Owner<T> owner_of(void* context) {
  return Owner<T>(static_cast<Reference<T>*>(context));
}

const char* title_of(OpType type) {
  return type == OpType::SEND   ? "pycomm:send"
         : type == OpType::RECV ? "pycomm:recv"
                                : "pycomm:recvAnySource";
}

}  // namespace

Work::Work(std::shared_ptr<Connection> connection, OpType type, const char* title,
           const Tensors& inputs)
    : ::c10d::Work(connection->rank(), type, title, inputs),
      connection_(std::move(connection)),
      title_(title) {}

bool Work::wait(Milliseconds timeout) {
  if (timeout != kNoTimeout) check_timeout(timeout);
  const auto start = std::chrono::steady_clock::now();
  while (!isCompleted()) {
    await(timeout == kNoTimeout ? kInterruptEvery : std::min(timeout, kInterruptEvery));
    if (isCompleted()) break;
    if (const Error error = native().check_waiting(connection_->group()); error != nullptr) {
      abort();
      check(error);
    }
    if (timeout != kNoTimeout && std::chrono::steady_clock::now() - start > timeout) {
      C10_THROW_ERROR(DistBackendError, std::string(title_) + " is not complete after " +
                                            std::to_string(timeout.count()) + " ms (Timed out)");
    }
  }
  future_.await();
  if (const std::exception_ptr error = exception()) std::rethrow_exception(error);
  return true;
}

void Work::await(Milliseconds patience) {
  std::unique_lock lock(mutex_);
  cv_.wait_for(lock, patience, [&] { return completed_; });
}

void Work::complete(const Tensors& value, const std::exception_ptr& error) {
  future_.complete(value, error);
  finish(error);
}

CollectiveWork::CollectiveWork(std::shared_ptr<Connection> connection, Request request)
    : Work(std::move(connection), request.type, request.title, request.inputs),
      request_(std::move(request)) {}

void CollectiveWork::run() {
  const std::vector<Call>& calls = request_.calls;
  const Error error = native().run(connection_->group(), calls.data(), calls.size());
  finish_request(error == nullptr ? nullptr : as_exception(error));
  if (exception_ != nullptr) std::rethrow_exception(exception_);
}

void CollectiveWork::submit(const c10::intrusive_ptr<CollectiveWork>& work) {
  auto reference = reference_to(work);
  const std::vector<Call>& calls = work->request_.calls;
  check(native().submit(work->connection_->group(), calls.data(), calls.size(),
                        &CollectiveWork::completed, reference.get()));
  reference.release();
}

void CollectiveWork::completed(void* context, Error error) {
  const CallingBack guard;
  const auto owner = owner_of<CollectiveWork>(context);
  owner->work->finish_request(error == nullptr ? nullptr : as_exception(error));
}

void CollectiveWork::finish_request(std::exception_ptr error) {
  try {
    if (error == nullptr) request_.finish();
  } catch (...) {
    error = std::current_exception();
  }
  complete(request_.outputs, error);
}

MessageWork::MessageWork(std::shared_ptr<Connection> connection, OpType type,
                         const at::Tensor& tensor)
    : Work(std::move(connection), type, title_of(type), {tensor}),
      tensor_(tensor),
      dense_(type == OpType::SEND ? plain(tensor) : memory_to_write(tensor)),
      receives_(type != OpType::SEND) {}

MessageWork::~MessageWork() {
  if (request_ != nullptr) native().release_message(request_);
}

void MessageWork::start(const c10::intrusive_ptr<MessageWork>& work, int peer, int tag,
                        Milliseconds timeout) {
  const at::Tensor& dense = work->dense_;
  const Message message{work->receives_,
                        peer,
                        tag,
                        element_of(dense),
                        static_cast<std::int64_t>(dense.nbytes()),
                        std::chrono::duration<double>(timeout).count()};
  auto reference = reference_to(work);
  void* request = nullptr;
  check(native().start_message(work->connection_->group(), dense.data_ptr(), message,
                               &MessageWork::completed, reference.get(), &request));
  reference.release();
  std::unique_lock lock(work->mutex_);
  work->request_ = request;
  if (!work->ended_) return;
  lock.unlock();
  work->finish_message();
}

void MessageWork::completed(void* context) {
  const CallingBack guard;
  const auto owner = owner_of<MessageWork>(context);
  MessageWork& work = *owner->work;
  std::unique_lock lock(work.mutex_);
  work.ended_ = true;
  if (work.request_ == nullptr) return;  // start() will finish the message
  lock.unlock();
  work.finish_message();
}

void MessageWork::finish_message() {
  std::exception_ptr error;
  try {
    check(native().error_of(request_));
    const at::NoGradGuard no_grad;
    if (receives_ && dense_.data_ptr() != tensor_.data_ptr()) tensor_.detach().copy_(dense_);
  } catch (...) {
    error = std::current_exception();
  }
  complete({tensor_}, error);
}

bool MessageWork::wait(Milliseconds timeout) {
  bool ended = false;
  if (timeout == kNoTimeout) check(native().wait_message(request_, -1, &ended));
  return Work::wait(timeout);
}

void MessageWork::await(Milliseconds patience) {
  bool ended = false;
  const double seconds = std::chrono::duration<double>(patience).count();
  if (const Error error = native().wait_message(request_, seconds, &ended)) {
    as_exception(error);  // finish_message() has got it, too
    ended = true;
  }
  if (ended) Work::await(patience);
}

}  // namespace pycomm::c10d
