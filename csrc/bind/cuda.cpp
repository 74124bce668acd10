// A group's CUDA side in Python: joins the kernels (cuda/) with the group that watches over them
// (cpu/).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <condition_variable>
#include <thread>

#include "bind/gil.h"
#include "bind/python.h"
#include "core/algorithms/select.h"
#include "core/call.h"
#include "core/errors.h"
#include "cpu/group.h"
#include "cuda/codecs/wire.h"
#include "cuda/endpoint.h"

namespace py = pybind11;

namespace pycomm::bind {
namespace {

using cuda::Compression;
using cuda::Endpoint;
using cuda::HostRegistration;
using cuda::SharedLaunch;

class CudaGroup {
 public:
  // `shared` where the ranks are threads on one device, null otherwise.
  CudaGroup(std::shared_ptr<cpu::Group> host, std::shared_ptr<Endpoint> endpoint,
            std::shared_ptr<SharedLaunch> shared)
      : host_(std::move(host)), endpoint_(std::move(endpoint)), shared_(std::move(shared)) {
    watcher_ = std::thread([this] { watch(); });
    host_->kernels_begin();
  }
  ~CudaGroup() {
    if (host_->forked()) {
      // The watcher does not exist here, and CUDA does not survive a fork: leak its objects.
      watcher_.detach();
      (void)new std::shared_ptr<Endpoint>(std::move(endpoint_));
      (void)new std::shared_ptr<SharedLaunch>(std::move(shared_));
    } else if (watcher_.joinable()) {
      const WithoutGil no_gil;
      try {
        endpoint_->synchronize();
      } catch (const std::exception&) {  // the device has failed
      }
      stop_watching();
    }
  }
  CudaGroup(const CudaGroup&) = delete;
  CudaGroup& operator=(const CudaGroup&) = delete;

  // Enqueues the operation on the stream.
  void run(const Call& call, std::uintptr_t stream, const Compression& compression = {}) {
    const std::lock_guard lock(running_);
    check();
    Operation operation = call.operation;
    operation.device = Device::cuda;
    operation.details = hash_of(details_of(call));
    operation.algorithm = resolve(operation, host_->size());
    endpoint_->check(operation);
    try {
      if (shared_ == nullptr) {
        endpoint_->launch(operation, call.input, call.output, stream, compression);
      } else {
        run_together(operation, call.input, call.output, stream, compression);
      }
    } catch (const CollectiveError&) {
      throw;
    } catch (...) {
      host_->abort();  // the peers must not wait for what will not come
      host_->comm().wait_for_kernels(cpu::kRetreatWithin);
      throw;
    }
  }

  // Raises what went wrong in a kernel, once; the group refuses work from then on. Before that, waits
  // until no rank's kernels use this rank's tensors, within the group's timeout.
  void check() {
    host_->check_usable();
    cuda::Failure found = endpoint_->failure();
    tell(found);
    const std::uint64_t word = host_->abort_word();
    if (found.reason == Reason::none && word == 0) return;
    // Ranks that disagree have not touched any tensors, and do not abort the group.
    if (word != 0) {
      host_->comm().wait_for_kernels(host_->comm().patience(), check_signals);
      found = endpoint_->failure();  // by now, which operation it was
    }
    const CollectiveError error = describe_failure(found, word);
    host_->fail(error.what());
    throw error;
  }

  // Lets everything that was enqueued end, under the watcher's eyes.
  void close() {
    if (host_->forked()) return;
    endpoint_->synchronize();
    stop_watching();
  }

 private:
  // All ranks see a disagreement by themselves.
  void tell(const cuda::Failure& found) {
    if (found.reason == Reason::none || found.reason == Reason::mismatch) return;
    host_->abort(found.abort_word);
  }

  CollectiveError describe_failure(const cuda::Failure& found, std::uint64_t word) const {
    if (found.reason == Reason::mismatch) {
      const int pid = host_->pid(found.rank);
      return mismatch(0, found.first, found.rank, found.other, pid, found.sequence);
    }
    if (!is_abort_word(word, host_->size())) return overwritten(found.first, found.sequence);
    const int rank = rank_of(word), pid = host_->pid(rank);
    if (reason_of(word) == Reason::timeout) {
      return timeout(word, rank == host_->rank(), pid, found.first, found.sequence);
    }
    return failure(reason_of(word), rank, pid, found.first, found.sequence);
  }

  // After the last kernel has ended.
  void stop_watching() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    if (watcher_.joinable()) watcher_.join();
    host_->kernels_ended();
  }

  void run_together(const Operation& operation, const void* input, void* output,
                    std::uintptr_t stream, const Compression& compression) {
    const int rank = host_->rank();
    shared_->put(rank, operation, input, output, stream, compression);
    try {
      host_->agree(operation, check_signals);
      if (rank == 0) shared_->launch([this] { return host_->abort_word() != 0; });
      host_->agree({}, check_signals);  // a barrier: it has been launched
    } catch (...) {
      host_->abort();
      shared_->follow(rank);  // if it has been launched, it uses this rank's tensors
      throw;
    }
    shared_->follow(rank);
  }

  // Carries news between the host's group and running kernels, both ways.
  void watch() {
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(lock, std::chrono::milliseconds(5), [&] { return stop_; })) {
      tell(endpoint_->failure());
      for (int r = 0; r < host_->size(); ++r) {
        if (r != host_->rank() && host_->gone(r)) endpoint_->set_gone(r);
      }
      if (const std::uint64_t word = host_->abort_word()) {
        endpoint_->set_abort(word);
        if (!endpoint_->in_peers_heaps()) host_->kernels_ended();
      }
    }
  }

  std::shared_ptr<cpu::Group> host_;
  std::shared_ptr<Endpoint> endpoint_;
  std::shared_ptr<SharedLaunch> shared_;
  cpu::OperationLock running_;  // one operation at a time is handed over
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  std::thread watcher_;
};

void run_compressed(CudaGroup& group, const Call& call, std::uintptr_t nonfinite,
                    std::uintptr_t workspace, std::uintptr_t stream) {
  const WithoutGil no_gil;
  group.run(call, stream,
            {call.feedback, reinterpret_cast<std::uint32_t*>(nonfinite),
             reinterpret_cast<std::byte*>(workspace)});
}

// A device, its stream and workspace, and elements that lie there.
cuda::WireJob wire_job(int device, std::uintptr_t stream, std::uintptr_t workspace,
                       const Codec& codec, int dtype, std::int64_t n, std::uintptr_t elements,
                       std::uintptr_t wire) {
  cuda::WireJob job;
  job.device = device;
  job.stream = stream;
  job.codec = codec;
  job.dtype = static_cast<DType>(dtype);
  job.n = n;
  job.elements = reinterpret_cast<std::byte*>(elements);
  job.wire = reinterpret_cast<std::byte*>(wire);
  job.workspace = reinterpret_cast<std::byte*>(workspace);
  return job;
}

void encode(int device, std::uintptr_t stream, std::uintptr_t workspace, const Codec& codec,
            int dtype, std::uintptr_t x, std::int64_t n, std::uintptr_t wire, std::uint64_t seed,
            std::uint32_t step, std::int64_t offset) {
  const WithoutGil no_gil;
  cuda::WireJob job = wire_job(device, stream, workspace, codec, dtype, n, x, wire);
  job.random = {seed, step, 0};
  job.offset = offset;
  cuda::encode(job);
}

void decode(int device, std::uintptr_t stream, std::uintptr_t workspace, const Codec& codec,
            std::uintptr_t wire, std::int64_t bytes, std::int64_t n, int dtype,
            std::uintptr_t output, bool add) {
  const WithoutGil no_gil;
  cuda::decode(wire_job(device, stream, workspace, codec, dtype, n, output, wire), bytes, add);
}

std::int64_t select(int device, std::uintptr_t stream, std::uintptr_t workspace, const Codec& codec,
                    int dtype, std::uintptr_t x, std::int64_t n, std::uintptr_t indices,
                    std::uintptr_t values) {
  const WithoutGil no_gil;
  return cuda::select(wire_job(device, stream, workspace, codec, dtype, n, x, 0),
                      reinterpret_cast<std::int64_t*>(indices), reinterpret_cast<float*>(values));
}

}  // namespace

void bind_cuda(py::module_& m) {
  m.attr("has_cuda") = PYCOMM_WITH_CUDA != 0;
  py::class_<Endpoint, std::shared_ptr<Endpoint>>(m, "CudaEndpoint")
      .def(py::init([](int device, int rank, int ranks, int lanes, std::int64_t staging_bytes,
                       std::int64_t window_bytes, double timeout,
                       std::vector<std::uintptr_t> windows, bool one_address_space,
                       bool stage_always) {
             return std::make_shared<Endpoint>(cuda::EndpointOptions{
                 device, rank, ranks, lanes, staging_bytes, window_bytes, timeout,
                 std::move(windows), one_address_space, stage_always});
           }),
           py::arg("device"), py::arg("rank"), py::arg("ranks"), py::arg("lanes"),
           py::arg("staging_bytes"), py::arg("window_bytes"), py::arg("timeout"),
           py::arg("windows"), py::arg("one_address_space"), py::arg("stage_always"),
           py::call_guard<WithoutGil>());
  py::class_<HostRegistration>(m, "CudaHostRegistration")
      .def(py::init<int, std::uintptr_t, std::int64_t>(), py::arg("device"), py::arg("data"),
           py::arg("bytes"))
      .def_property_readonly("address", &HostRegistration::address);
  py::class_<SharedLaunch, std::shared_ptr<SharedLaunch>>(m, "CudaSharedLaunch")
      .def(py::init<std::vector<std::shared_ptr<Endpoint>>>(), py::arg("endpoints"));
  py::class_<CudaGroup>(m, "CudaGroup")
      .def(py::init<std::shared_ptr<cpu::Group>, std::shared_ptr<Endpoint>,
                    std::shared_ptr<SharedLaunch>>(),
           py::arg("host"), py::arg("endpoint"), py::arg("shared").none(true))
      .def("check", &CudaGroup::check, py::call_guard<WithoutGil>())
      .def("close", &CudaGroup::close, py::call_guard<WithoutGil>())
      .def("run",
           [](CudaGroup& group, int collective, int algorithm, int dtype, int op, int root,
              std::int64_t count, std::uintptr_t input, std::uintptr_t output,
              std::uintptr_t stream, const Shape& shape, const std::string& label) {
             const WithoutGil no_gil;
             group.run({{static_cast<Collective>(collective), static_cast<Algorithm>(algorithm),
                         static_cast<DType>(dtype), static_cast<ReduceOp>(op), root, count},
                        reinterpret_cast<const void*>(input),
                        reinterpret_cast<void*>(output),
                        {},
                        make_details(shape, label)},
                       stream);
           })
      .def("run_compressed", &run_compressed);
  m.def("cuda_encode", &encode);
  m.def("cuda_decode", &decode);
  m.def("cuda_select", &select);
  m.def("cuda_workspace_bytes", &cuda::workspace_bytes, py::arg("codec"), py::arg("n"),
        py::arg("ranks"), py::arg("exchange"));
  m.def("cuda_least_staging_bytes", &cuda::least_staging_bytes, py::arg("ranks"), py::arg("lanes"));
  m.def("cuda_window_bytes", &cuda::window_bytes, py::arg("ranks"), py::arg("lanes"),
        py::arg("staging_bytes"), py::arg("heap_bytes"));
  m.def("cuda_heap_begin", &cuda::heap_begin, py::arg("ranks"), py::arg("lanes"),
        py::arg("staging_bytes"));
}

}  // namespace pycomm::bind
