// pycomm as a backend of torch.distributed: a c10d::Backend that turns tensors into calls of
// pycomm._C. It has no algorithms.
//
// CPU tensors are exchanged on the host, and CUDA tensors by kernels. What kernels cannot exchange is
// staged: copied to host memory and back. Between nodes, NCCL has CUDA tensors if torch has it.
// Operations without a native path go to Gloo.
//
// It overrides the virtual functions by the names that torch 2.11 gave them; later versions forward
// their new names to these.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "c10d/connection.h"
#include "c10d/work.h"

namespace pycomm::c10d {

using TensorLists = std::vector<Tensors>;

// As torch's, but copies can be made in Python, where torch.distributed.split_group() makes one.
struct BackendOptions final : ::c10d::Backend::Options {
  using ::c10d::Backend::Options::Options;

  Algorithm algorithm = Algorithm::automatic;  // of all-reduces
};

class Backend final : public ::c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<::c10d::Work>;

  // `ranks` connects the group's ranks: pycomm/backend.py.
  Backend(int rank, int size, Milliseconds timeout, Algorithm algorithm, pybind11::object ranks);
  ~Backend() override;

  const std::string getBackendName() const override { return "pycomm"; }
  void setTimeout(Milliseconds timeout) override;

  WorkPtr broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const ::c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const ::c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const ::c10d::ReduceOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const ::c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const ::c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const ::c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const ::c10d::AllgatherOptions& options) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs,
                 const ::c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                  const ::c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const ::c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const ::c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const ::c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const ::c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const ::c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const ::c10d::BarrierOptions& options) override;
  void monitoredBarrier(const ::c10d::BarrierOptions& options, bool wait_all_ranks) override;

  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return sequence_; }
  // Between these, works are collected; the second returns one that waits for all.
  void startCoalescing() override { coalesced_.emplace(); }
  WorkPtr endCoalescing() override;
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<::c10d::Backend::Options> getBackendOptions() override;
  // The backend of a group of some ranks of this one; null on the others.
  c10::intrusive_ptr<::c10d::Backend> split(
      const c10::intrusive_ptr<::c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<::c10d::Backend::Options>& options) override;
  bool supportsShrinking() const override { return true; }
  // The backend of the group without some of its ranks. The flags make no difference: operations
  // that still run are aborted in any case.
  c10::intrusive_ptr<::c10d::Backend> shrink(
      const std::vector<int64_t>& excluded, int flags,
      const c10::intrusive_ptr<::c10d::Backend::Options>& options) override;
  // The backend of a group that joins this one with others.
  c10::intrusive_ptr<::c10d::Backend> merge(
      const c10::intrusive_ptr<::c10d::Store>& store,
      const c10::intrusive_ptr<::c10d::Backend::Options>& options, const int& rank,
      const int& size) override;
#ifdef C10D_BACKEND_HAS_RECONFIGURE  // torch 2.14
  bool supportsReconfigure() const override { return true; }
  ::c10d::ReconfigureHandle get_reconfigure_handle() const override;
  WorkPtr reconfigure(const ::c10d::ReconfigureOptions& options) override;
#endif
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  void abort() override;
  void shutdown() override;

 private:
  // The Gloo backend, for an operation that has no native path.
  ::c10d::Backend& gloo(const char* what);
  // The list that only the root passes; empty on other ranks.
  Tensors on_root(const TensorLists& lists, std::int64_t root, const char* what) const;
  // The NCCL backend, for tensors on `device`; null if they are pycomm's to exchange.
  ::c10d::Backend* nccl(c10::Device device);
  // The same for an all-reduce. Throws pycomm.ArgumentError if the group's algorithm is not NCCL's.
  ::c10d::Backend* nccl_for_sums(c10::Device device);
  Request request(OpType type, const char* title, Milliseconds timeout, c10::Device device);
  Place place_of(c10::Device device);
  std::optional<StreamOrder> order(c10::Device device, bool async);
  // Says in the log, once, that an operation of CUDA tensors goes through host memory.
  void tell_staged(const char* title);
  void* group() { return connection_.load()->group(); }
  WorkPtr launch(Request request, bool async);
  // Returns the work, and collects it while works are.
  WorkPtr coalesced(WorkPtr work);
  // make(), or the backend of this name that it has made and that is in use: torch asks for one per
  // type of device, and keeps one. With the GIL.
  template <class Make>
  c10::intrusive_ptr<Backend> made_once(const std::string& name, const Make& make);
  WorkPtr message(OpType type, const Tensors& tensors, int peer, int tag);

  // The algorithm in the options of a group that is made from this one, or this one's.
  Algorithm algorithm_of(const c10::intrusive_ptr<::c10d::Backend::Options>& options) const;

  std::atomic<Milliseconds> timeout_;
  const Algorithm algorithm_;  // of all-reduces
  std::atomic<std::uint64_t> sequence_{0};
  std::atomic<bool> closed_{false};
  std::atomic<std::shared_ptr<Connection>> connection_;  // reconfigure() replaces it
  std::optional<std::vector<WorkPtr>> coalesced_;
  std::map<std::string, c10::weak_intrusive_ptr<Backend>> made_;  // by split() and merge()
  std::mutex making_others_;
  pybind11::object ranks_;
  c10::intrusive_ptr<::c10d::Backend> gloo_;
  std::optional<c10::intrusive_ptr<::c10d::Backend>> nccl_;  // null if there is none
};

}  // namespace pycomm::c10d
