#include "c10d/backend.h"

#include <algorithm>

#include "c10d/arguments.h"
#include "core/algorithms/relay.h"

namespace py = pybind11;

namespace pycomm::c10d {
namespace {

using ::c10d::kUnsetTimeout;

template <class T>
const T& only(const std::vector<T>& tensors, const char* what) {
  check_argument(tensors.size() == 1, what, " takes one tensor, got ", tensors.size());
  return tensors.front();
}

void check_pairs(const Tensors& outputs, const Tensors& inputs) {
  check_argument(outputs.size() == inputs.size(), "outputs must have as many tensors as inputs, ",
                 inputs.size(), ", got ", outputs.size());
}

// The device of an operation's first tensor; check_tensor() compares the others.
c10::Device device_of(const Tensors& tensors) {
  return tensors.empty() ? c10::Device(c10::kCPU) : tensors.front().device();
}

double seconds_of(Milliseconds time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

Tensors Backend::on_root(const TensorLists& lists, std::int64_t root, const char* what) const {
  if (getRank() == root) return only(lists, what);
  check_argument(lists.empty(), what, " takes a list of tensors on rank ", root, " only");
  return {};
}

Backend::Backend(int rank, int size, Milliseconds timeout, Algorithm algorithm, py::object ranks)
    : ::c10d::Backend(rank, size),
      timeout_(timeout),
      algorithm_(algorithm),
      connection_(std::make_shared<Connection>(rank, ranks.attr("connect"))),
      ranks_(std::move(ranks)) {
  check_timeout(timeout);
}

Backend::~Backend() { drop(std::move(ranks_)); }

::c10d::Backend& Backend::gloo(const char* what) {
  const LockWithoutGil lock(making_others_);
  const py::gil_scoped_acquire gil;
  // Also writes the log.
  const py::object made = ranks_.attr("connect_gloo")(what, seconds_of(timeout_));
  if (gloo_ == nullptr) gloo_ = made.cast<c10::intrusive_ptr<::c10d::Backend>>();
  return *gloo_;
}

void Backend::setTimeout(Milliseconds timeout) {
  check_timeout(timeout);
  const LockWithoutGil lock(making_others_);
  timeout_ = timeout;
  if (gloo_ != nullptr) gloo_->setTimeout(timeout);
  if (nccl_.has_value() && *nccl_) (*nccl_)->setTimeout(timeout);
}

Request Backend::request(OpType type, const char* title, Milliseconds timeout, c10::Device device) {
  if (timeout == kUnsetTimeout) timeout = timeout_;
  check_timeout(timeout);
  return {type, title, getRank(), getSize(), timeout, device, place_of(device)};
}

Place Backend::place_of(c10::Device device) {
  if (!device.is_cuda()) return Place::host;
  return connection_.load()->spans_nodes() ? Place::staged : Place::device;
}

std::optional<StreamOrder> Backend::order(c10::Device device, bool async) {
  if (!device.is_cuda()) return {};
  return StreamOrder(async ? connection_.load()->stream(device) : current_stream(device));
}

Backend::WorkPtr Backend::launch(Request request, bool async) {
  ++sequence_;
  std::optional<StreamOrder> order = this->order(request.device, async);
  if (request.place() == Place::device) {
    auto work =
        c10::make_intrusive<KernelWork>(connection_.load(), std::move(request), std::move(*order));
    work->enqueue();
    return coalesced(work);
  }
  if (request.place() == Place::staged) tell_staged(request.title);
  auto work =
      c10::make_intrusive<CollectiveWork>(connection_.load(), std::move(request), std::move(order));
  async ? CollectiveWork::submit(work) : work->run();
  return coalesced(work);
}

Backend::WorkPtr Backend::coalesced(WorkPtr work) {
  if (coalesced_.has_value() && work != nullptr) coalesced_->push_back(work);
  return work;
}

Backend::WorkPtr Backend::endCoalescing() {
  check_argument(coalesced_.has_value(), "endCoalescing must follow startCoalescing");
  return c10::make_intrusive<CoalescedWork>(*std::exchange(coalesced_, std::nullopt));
}

void Backend::tell_staged(const char* title) {
  const py::gil_scoped_acquire gil;
  ranks_.attr("tell_staged")(title);
}

::c10d::Backend* Backend::nccl(c10::Device device) {
  if (!device.is_cuda() || !connection_.load()->spans_nodes()) return nullptr;
  const LockWithoutGil lock(making_others_);
  if (nccl_.has_value()) return nccl_->get();
  const py::gil_scoped_acquire gil;
  const py::object made = ranks_.attr("connect_nccl")(seconds_of(timeout_));
  using Pointer = c10::intrusive_ptr<::c10d::Backend>;
  nccl_ = made.is_none() ? Pointer() : made.cast<Pointer>();
  return nccl_->get();
}

::c10d::Backend* Backend::nccl_for_sums(c10::Device device) {
  auto* const nccl = this->nccl(device);
  check_argument(nccl == nullptr || !relays(algorithm_),
                 "algorithm must be auto or two_shot for CUDA tensors over NCCL, got ",
                 name_of(algorithm_));
  return nccl;
}

Backend::WorkPtr Backend::broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& options) {
  const c10::Device device = device_of(tensors);
  if (auto* const nccl = this->nccl(device)) return coalesced(nccl->broadcast(tensors, options));
  Request made = request(OpType::BROADCAST, "pycomm:broadcast", options.timeout, device);
  made.broadcast(only(tensors, "broadcast"), options.rootRank);
  return launch(std::move(made), options.asyncOp);
}

Backend::WorkPtr Backend::allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = only(tensors, "all_reduce");
  if (tensor.is_sparse()) return allreduce_sparse(tensors, options);
  const c10::Device device = device_of(tensors);
  if (auto* const nccl = nccl_for_sums(device)) return coalesced(nccl->allreduce(tensors, options));
  Request made = request(OpType::ALLREDUCE, "pycomm:all_reduce", options.timeout, device);
  made.all_reduce(tensor, options.reduceOp, algorithm_);
  return launch(std::move(made), options.asyncOp);
}

Backend::WorkPtr Backend::allreduce_sparse(Tensors& tensors,
                                           const ::c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = only(tensors, "all_reduce");
  check_argument(tensor.is_cpu(), "all_reduce of sparse tensors takes CPU tensors, got one on ",
                 tensor.device());
  return coalesced(gloo("all_reduce of sparse tensors").allreduce(tensors, options));
}

Backend::WorkPtr Backend::allreduce_coalesced(Tensors& tensors,
                                              const ::c10d::AllreduceCoalescedOptions& options) {
  const c10::Device device = device_of(tensors);
  if (auto* const nccl = nccl_for_sums(device))
    return coalesced(nccl->allreduce_coalesced(tensors, options));
  Request made =
      request(OpType::ALLREDUCE_COALESCED, "pycomm:all_reduce_coalesced", options.timeout, device);
  for (const at::Tensor& tensor : tensors) made.all_reduce(tensor, options.reduceOp, algorithm_);
  return launch(std::move(made), options.asyncOp);
}

Backend::WorkPtr Backend::reduce(Tensors& tensors, const ::c10d::ReduceOptions& options) {
  const c10::Device device = device_of(tensors);
  if (auto* const nccl = this->nccl(device)) return coalesced(nccl->reduce(tensors, options));
  Request made = request(OpType::REDUCE, "pycomm:reduce", options.timeout, device);
  made.reduce(only(tensors, "reduce"), options.reduceOp, options.rootRank);
  return launch(std::move(made), options.asyncOp);
}

Backend::WorkPtr Backend::allgather(TensorLists& outputs, Tensors& inputs,
                                    const ::c10d::AllgatherOptions& options) {
  const c10::Device device = device_of(inputs);
  if (auto* const nccl = this->nccl(device))
    return coalesced(nccl->allgather(outputs, inputs, options));
  Request made = request(OpType::ALLGATHER, "pycomm:all_gather", options.timeout, device);
  made.all_gather(only(outputs, "all_gather"), only(inputs, "all_gather"));
  return launch(std::move(made), options.asyncOp);
}

Backend::WorkPtr Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                          const ::c10d::AllgatherOptions& options) {
  const c10::Device device = input.device();
  if (auto* const nccl = this->nccl(device))
    return coalesced(nccl->_allgather_base(output, input, options));
  Request made =
      request(OpType::_ALLGATHER_BASE, "pycomm:_all_gather_base", options.timeout, device);
  made.all_gather(output, input);
  return launch(std::move(made), options.asyncOp);
}

// The lists have the order of the deprecated operation: outputs[rank][tensor].
Backend::WorkPtr Backend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                              const ::c10d::AllgatherOptions& options) {
  const c10::Device device = device_of(inputs);
  if (auto* const nccl = this->nccl(device))
    return coalesced(nccl->allgather_coalesced(outputs, inputs, options));
  Request made =
      request(OpType::ALLGATHER_COALESCED, "pycomm:all_gather_coalesced", options.timeout, device);
  TensorLists blocks(inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    for (const Tensors& of_rank : outputs) {
      check_argument(of_rank.size() == inputs.size(), "output_tensor_lists must have ",
                     inputs.size(), " tensors per rank, got ", of_rank.size());
      blocks[i].push_back(of_rank[i]);
    }
    made.stage_unless_equal(blocks[i]);
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) made.all_gather(blocks[i], inputs[i]);
  return launch(std::move(made), options.asyncOp);
}

Backend::WorkPtr Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const ::c10d::AllgatherOptions& options) {
  const c10::Device device = device_of(inputs);
  if (auto* const nccl = this->nccl(device))
    return coalesced(nccl->allgather_into_tensor_coalesced(outputs, inputs, options));
  check_pairs(outputs, inputs);
  Request made = request(OpType::COALESCED, "pycomm:all_gather_into_tensor_coalesced",
                         options.timeout, device);
  for (std::size_t i = 0; i < inputs.size(); ++i) made.all_gather(outputs[i], inputs[i]);
  return launch(std::move(made), options.asyncOp);
}

Backend::WorkPtr Backend::gather(TensorLists& outputs, Tensors& inputs,
                                 const ::c10d::GatherOptions& options) {
  const c10::Device device = device_of(inputs);
  if (auto* const nccl = this->nccl(device))
    return coalesced(nccl->gather(outputs, inputs, options));
  Request made = request(OpType::GATHER, "pycomm:gather", options.timeout, device);
  made.gather(on_root(outputs, options.rootRank, "gather"), only(inputs, "gather"),
              options.rootRank);
  return launch(std::move(made), options.asyncOp);
}

Backend::WorkPtr Backend::scatter(Tensors& outputs, TensorLists& inputs,
                                  const ::c10d::ScatterOptions& options) {
  const c10::Device device = device_of(outputs);
  if (auto* const nccl = this->nccl(device))
    return coalesced(nccl->scatter(outputs, inputs, options));
  Request made = request(OpType::SCATTER, "pycomm:scatter", options.timeout, device);
  made.scatter(only(outputs, "scatter"), on_root(inputs, options.rootRank, "scatter"),
               options.rootRank);
  return launch(std::move(made), options.asyncOp);
}

Backend::WorkPtr Backend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                         const ::c10d::ReduceScatterOptions& options) {
  const c10::Device device = device_of(outputs);
  if (auto* const nccl = this->nccl(device))
    return coalesced(nccl->reduce_scatter(outputs, inputs, options));
  Request made = request(OpType::REDUCE_SCATTER, "pycomm:reduce_scatter", options.timeout, device);
  made.reduce_scatter(only(outputs, "reduce_scatter"), only(inputs, "reduce_scatter"),
                      options.reduceOp);
  return launch(std::move(made), options.asyncOp);
}

Backend::WorkPtr Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                               const ::c10d::ReduceScatterOptions& options) {
  const c10::Device device = output.device();
  if (auto* const nccl = this->nccl(device))
    return coalesced(nccl->_reduce_scatter_base(output, input, options));
  Request made =
      request(OpType::_REDUCE_SCATTER_BASE, "pycomm:_reduce_scatter_base", options.timeout, device);
  made.reduce_scatter(output, input, options.reduceOp);
  return launch(std::move(made), options.asyncOp);
}

Backend::WorkPtr Backend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const ::c10d::ReduceScatterOptions& options) {
  const c10::Device device = device_of(outputs);
  if (auto* const nccl = this->nccl(device))
    return coalesced(nccl->reduce_scatter_tensor_coalesced(outputs, inputs, options));
  check_pairs(outputs, inputs);
  Request made =
      request(OpType::COALESCED, "pycomm:reduce_scatter_tensor_coalesced", options.timeout, device);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    made.reduce_scatter(outputs[i], inputs[i], options.reduceOp);
  }
  return launch(std::move(made), options.asyncOp);
}

Backend::WorkPtr Backend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                        std::vector<int64_t>& output_splits,
                                        std::vector<int64_t>& input_splits,
                                        const ::c10d::AllToAllOptions& options) {
  const c10::Device device = output.device();
  if (auto* const nccl = this->nccl(device))
    return coalesced(nccl->alltoall_base(output, input, output_splits, input_splits, options));
  Request made = request(OpType::ALLTOALL_BASE, "pycomm:all_to_all", options.timeout, device);
  made.all_to_all(output, input, output_splits, input_splits);
  return launch(std::move(made), options.asyncOp);
}

Backend::WorkPtr Backend::alltoall(Tensors& outputs, Tensors& inputs,
                                   const ::c10d::AllToAllOptions& options) {
  const c10::Device device = device_of(outputs);
  if (auto* const nccl = this->nccl(device))
    return coalesced(nccl->alltoall(outputs, inputs, options));
  Request made = request(OpType::ALLTOALL, "pycomm:all_to_all", options.timeout, device);
  made.all_to_all(outputs, inputs);
  return launch(std::move(made), options.asyncOp);
}

Backend::WorkPtr Backend::message(OpType type, const Tensors& tensors, int peer, int tag) {
  const bool sends = type == OpType::SEND;
  const char* const what = sends ? "send" : "recv";
  const at::Tensor& tensor = only(tensors, what);
  check_tensor(tensor, what, tensor.device());
  if (type != OpType::RECVANYSOURCE) check_rank(peer, getSize(), sends ? "dst" : "src");
  if (tensor.is_cuda()) check_can_be_matched(what);
  const auto work = c10::make_intrusive<MessageWork>(connection_.load(), type, tensor, peer,
                                                     order(tensor.device(), true));
  if (work->is_staged()) tell_staged(what);
  MessageWork::start(work, tag, timeout_);
  return coalesced(work);
}

Backend::WorkPtr Backend::send(Tensors& tensors, int to, int tag) {
  return message(OpType::SEND, tensors, to, tag);
}

Backend::WorkPtr Backend::recv(Tensors& tensors, int from, int tag) {
  return message(OpType::RECV, tensors, from, tag);
}

Backend::WorkPtr Backend::recvAnysource(Tensors& tensors, int tag) {
  return message(OpType::RECVANYSOURCE, tensors, kAnySource, tag);
}

Backend::WorkPtr Backend::barrier(const ::c10d::BarrierOptions& options) {
  if (options.device && options.device->is_cuda()) current_stream(*options.device).synchronize();
  Request made = request(OpType::BARRIER, "pycomm:barrier", options.timeout, c10::kCPU);
  made.barrier();
  return launch(std::move(made), options.asyncOp);
}

void Backend::monitoredBarrier(const ::c10d::BarrierOptions& options, bool wait_all_ranks) {
  const py::gil_scoped_acquire gil;
  const Milliseconds timeout = options.timeout == kUnsetTimeout ? timeout_.load() : options.timeout;
  ranks_.attr("monitored_barrier")(seconds_of(timeout), wait_all_ranks);
}

c10::intrusive_ptr<::c10d::Backend::Options> Backend::getBackendOptions() {
  auto options = c10::make_intrusive<BackendOptions>("pycomm", timeout_.load());
  options->algorithm = algorithm_;
  return options;
}

Algorithm Backend::algorithm_of(const c10::intrusive_ptr<::c10d::Backend::Options>& options) const {
  const auto* const given = dynamic_cast<const BackendOptions*>(options.get());
  return given == nullptr ? algorithm_ : given->algorithm;
}

template <class Make>
c10::intrusive_ptr<Backend> Backend::made_once(const std::string& name, const Make& make) {
  auto found = made_.find(name);
  if (found != made_.end()) {
    if (auto living = found->second.lock()) return living;
    made_.erase(found);
  }
  c10::intrusive_ptr<Backend> made = make();
  made_.emplace(name, made);
  return made;
}

c10::intrusive_ptr<::c10d::Backend> Backend::split(
    const c10::intrusive_ptr<::c10d::Store>&, const std::vector<int>& ranks,
    const c10::intrusive_ptr<::c10d::Backend::Options>& options) {
  const auto mine = std::find(ranks.begin(), ranks.end(), getRank());
  if (mine == ranks.end()) return {};
  const auto rank = static_cast<int>(mine - ranks.begin()), size = static_cast<int>(ranks.size());
  const py::gil_scoped_acquire gil;
  return made_once(options->group_name, [&] {
    py::object made =
        ranks_.attr("split")(ranks, rank, seconds_of(options->timeout), options->group_name);
    return c10::make_intrusive<Backend>(rank, size, options->timeout, algorithm_of(options),
                                        std::move(made));
  });
}

c10::intrusive_ptr<::c10d::Backend> Backend::merge(
    const c10::intrusive_ptr<::c10d::Store>& store,
    const c10::intrusive_ptr<::c10d::Backend::Options>& options, const int& rank, const int& size) {
  const py::gil_scoped_acquire gil;
  return made_once(options->group_name, [&] {
    py::object made =
        ranks_.attr("merge")(store, rank, size, seconds_of(options->timeout), options->group_name);
    return c10::make_intrusive<Backend>(rank, size, options->timeout, algorithm_of(options),
                                        std::move(made));
  });
}

c10::intrusive_ptr<::c10d::Backend> Backend::shrink(
    const std::vector<int64_t>& excluded, int,
    const c10::intrusive_ptr<::c10d::Backend::Options>& options) {
  const Milliseconds timeout = options == nullptr ? timeout_.load() : options->timeout;
  check_timeout(timeout);
  const py::gil_scoped_acquire gil;
  py::object made = ranks_.attr("shrink")(excluded, seconds_of(timeout));
  const auto rank = made.attr("rank").cast<int>(), size = made.attr("size").cast<int>();
  return c10::make_intrusive<Backend>(rank, size, timeout, algorithm_of(options), std::move(made));
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE
::c10d::ReconfigureHandle Backend::get_reconfigure_handle() const {
  const py::gil_scoped_acquire gil;
  return ranks_.attr("handle").cast<std::string>();
}

// No other operation may be under way in this process, because rank and size change.
Backend::WorkPtr Backend::reconfigure(const ::c10d::ReconfigureOptions& options) {
  const Milliseconds patience = options.timeout.value_or(timeout_.load());
  check_timeout(patience);
  const py::gil_scoped_acquire gil;
  const py::object handles =  // a list or a set
      std::visit([](const auto& given) -> py::object { return py::cast(given); }, options.handles);
  py::object ranks =
      ranks_.attr("reconfigure")(options.uuid, handles, seconds_of(patience), seconds_of(timeout_));
  rank_ = ranks.attr("rank").cast<int>();
  size_ = ranks.attr("size").cast<int>();
  connection_ = std::make_shared<Connection>(rank_, ranks.attr("connect"));
  sequence_ = 0;
  {
    const LockWithoutGil lock(making_others_);
    std::swap(ranks_, ranks);
    gloo_.reset();
    nccl_.reset();
  }
  const auto done =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  done->markCompleted(Tensors());
  return ::c10d::Work::create_from_future(done);
}
#endif

at::Tensor Backend::allocateTensor(long size, at::TensorOptions options) {
  const std::int64_t bytes = size * static_cast<std::int64_t>(options.dtype().itemsize());
  if (bytes == 0 || !options.device().is_cpu()) return at::empty(size, options);
  void *data = nullptr, *owner = nullptr;
  check(native().allocate(group(), bytes, &data, &owner));
  return at::from_blob(data, {size}, [owner](void*) { native().free_memory(owner); }, options);
}

// Connects the group if it has not been used, because other ranks may be about to use it. If
// connecting fails, for example because the Store is gone, this rank has left the group, and others
// see that.
void Backend::abort() {
  if (closed_) return;
  void* connected = nullptr;
  try {
    connected = group();
  } catch (py::error_already_set& error) {
    const py::gil_scoped_acquire gil;
    if (error.matches(PyExc_Exception)) return;
    throw;
  }
  native().abort(connected);
  const LockWithoutGil lock(making_others_);
  if (nccl_.has_value() && *nccl_) (*nccl_)->abort();
}

void Backend::shutdown() {
  closed_ = true;
  {
    const LockWithoutGil lock(making_others_);
    if (nccl_.has_value() && *nccl_) (*nccl_)->shutdown();
  }
  const py::gil_scoped_acquire gil;
  ranks_.attr("close")();
}

}  // namespace pycomm::c10d
