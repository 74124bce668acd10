// An operation of torch.distributed as calls of pycomm._C, with the tensors that they use.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <deque>
#include <utility>
#include <vector>

#include "core/call.h"

namespace pycomm::c10d {

using ::c10d::OpType;
using Milliseconds = std::chrono::milliseconds;

using Tensors = std::vector<at::Tensor>;

// Where a request's calls run: on the host; by kernels; or on the host for tensors of a device, which
// have stand-ins in pinned memory.
enum class Place { host, device, staged };

// Throws pycomm.ArgumentError unless `what`, which has a tensor on `device`, can take this one.
void check_tensor(const at::Tensor& tensor, const char* what, c10::Device device);
// The element type of a tensor. Throws pycomm.ArgumentTypeError for one that pycomm._C cannot
// move.
Element element_of(const at::Tensor& tensor);
// Throws pycomm.ArgumentError if a CUDA graph captures the current stream. It cannot capture `what`,
// whose tensors are staged, or a message.
void check_can_be_staged(const char* what);
void check_can_be_matched(const char* what);
// is_plain(): whether a tensor's memory holds its elements in order. plain(): the tensor if it is
// plain and need not be staged, or a copy that is. The host waits for a copy in host memory.
bool is_plain(const at::Tensor& tensor);
at::Tensor plain(const at::Tensor& tensor, Place place);
// Counts a write, so that autograd does not use what it has saved of the tensor.
void count_write(const at::Tensor& tensor);
// Where an operation writes an output: its own memory, or if it is not plain or is staged, memory to
// be copied to it. Throws RuntimeError if elements of the output share memory.
at::Tensor memory_to_write(const at::Tensor& output, Place place);

// Throws pycomm.ArgumentError unless there is a rank with this number; `name` is the argument's.
void check_rank(std::int64_t rank, int ranks, const char* name);
// Throws pycomm.ArgumentError for a timeout that no operation can have.
void check_timeout(Milliseconds timeout);

class Request {
 public:
  // `title` is for the profiler and for messages; `rank` is this one of `ranks` in the group.
  Request(OpType type, const char* title, int rank, int ranks, Milliseconds timeout,
          c10::Device device, Place place)
      : type(type),
        title(title),
        device(device),
        rank_(rank),
        ranks_(ranks),
        timeout_(timeout),
        place_(place) {
    if (place == Place::staged) check_can_be_staged(title);
  }

  Place place() const { return place_; }

  // Add a call. Tensors that are not contiguous get stand-ins.
  void all_reduce(const at::Tensor& tensor, const ::c10d::ReduceOp& op, Algorithm algorithm);
  void reduce(const at::Tensor& tensor, const ::c10d::ReduceOp& op, std::int64_t root);
  void broadcast(const at::Tensor& tensor, std::int64_t root);
  void all_gather(const at::Tensor& output, const at::Tensor& input);
  void reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                      const ::c10d::ReduceOp& op);
  // Splits are sizes in the first dimension, one per rank; none if all are equal.
  void all_to_all(const at::Tensor& output, const at::Tensor& input,
                  const std::vector<std::int64_t>& output_splits,
                  const std::vector<std::int64_t>& input_splits);
  void barrier();
  // Kernels take blocks of one size only, which all ranks must know: others are staged. A request
  // with several lists needs this for each of them before it adds a call.
  void stage_unless_equal(const Tensors& list);
  // The forms with a list of tensors, one per rank, which may differ in size except for gather and
  // scatter. The lists of gather and scatter are empty except on the root.
  void all_gather(const Tensors& outputs, const at::Tensor& input);
  void reduce_scatter(const at::Tensor& output, const Tensors& inputs, const ::c10d::ReduceOp& op);
  void gather(const Tensors& outputs, const at::Tensor& input, std::int64_t root);
  void scatter(const at::Tensor& output, const Tensors& inputs, std::int64_t root);
  void all_to_all(const Tensors& outputs, const Tensors& inputs);

  // Copies results from stand-ins, on the current stream.
  void copy_results();
  // Frees what only the calls have used.
  void release();
  // Lets the allocator keep the memory of all tensors until `stream` has done its work so far.
  void record_stream(c10::Stream stream) const;

  OpType type;
  const char* title;
  const c10::Device device;
  Tensors inputs;   // for the profiler
  Tensors outputs;  // the operation's results
  std::vector<Call> calls;

 private:
  at::Tensor to_read(const at::Tensor& tensor);
  at::Tensor to_write(const at::Tensor& tensor);
  at::Tensor to_update(const at::Tensor& tensor);
  // A tensor multiplied by the factor of PREMUL_SUM, or the tensor itself.
  at::Tensor scaled(const at::Tensor& tensor, const ::c10d::ReduceOp& op);
  struct BlockArrays {
    std::vector<const void*> addresses;
    std::vector<std::int64_t> counts;
  };

  enum class Counts { equal, each_its_own };
  // Give a call the blocks of a list as its input or output. Kernels take blocks in one tensor.
  void read_blocks(Call& call, const Tensors& list, Counts counts);
  void write_blocks(Call& call, const Tensors& list, Counts counts);
  static Blocks made_of(const BlockArrays& arrays, Counts counts);
  void stage();
  // The blocks of a tensor that is split.
  Blocks blocks_of(const at::Tensor& whole, const std::vector<std::int64_t>& splits);
  void check(const at::Tensor& tensor) const;
  void check_blocks(const at::Tensor& whole, const char* name, const at::Tensor& block,
                    const char* block_name) const;
  void check_list(const Tensors& list, const char* name, const at::Tensor& like) const;
  void check_sizes(const Tensors& list, const char* name, std::int64_t count) const;
  // Throws unless this rank's tensor in a list is as large as the one that it stands for.
  void check_own(const Tensors& list, const char* name, const at::Tensor& own) const;
  Call& add(Collective collective, const at::Tensor& input, const at::Tensor& output,
            std::int64_t count, const ::c10d::ReduceOp& op = {}, std::int64_t root = 0);

  const int rank_;
  const int ranks_;
  const Milliseconds timeout_;
  Place place_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  // to, from
  Tensors kept_;                                           // what the calls use
  std::deque<BlockArrays> blocks_;                         // of the calls
};

}  // namespace pycomm::c10d
