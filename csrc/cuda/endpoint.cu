#include "cuda/endpoint.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "cuda/device_copies.cuh"
#include "cuda/order.cuh"
#include "cuda/regions.cuh"
#include "cuda/runtime.cuh"

namespace pycomm::cuda {
namespace {

cudaStream_t stream_of(std::uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

// Lets kernels use peers' memory. Once per pair of devices is enough; a second time is no error.
void enable_peer_access(const std::vector<std::uintptr_t>& windows, int device) {
  for (const std::uintptr_t window : windows) {
    cudaPointerAttributes attributes{};
    PYCOMM_CUDA_CHECK(cudaPointerGetAttributes(&attributes, reinterpret_cast<void*>(window)));
    if (attributes.type != cudaMemoryTypeDevice || attributes.device == device) continue;
    const cudaError_t error = cudaDeviceEnablePeerAccess(attributes.device, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
      (void)cudaGetLastError();
    } else {
      PYCOMM_CUDA_CHECK(error);
    }
  }
}

// With lazy loading, CUDA loads a kernel when it is first launched, and may wait until the device is
// idle to do so. A collective that waits for another rank may then keep the device busy for ever, if
// that rank waits for the loader. So all kernels are loaded before any can wait.
void load_kernels() {
  for (const void* const kernel : kernels()) {
    cudaFuncAttributes attributes;
    PYCOMM_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
  }
}

}  // namespace

struct Endpoint::Impl {
  struct Free {
    void operator()(Mailbox* pinned) const { (void)cudaFreeHost(pinned); }
  };

  EndpointOptions options;
  WindowLayout layout;
  std::unique_ptr<Mailbox, Free> mailbox;  // by its address on the host
  Mailbox* device_mailbox = nullptr;       // its address on the device
  std::shared_ptr<Regions> regions;
  std::unique_ptr<Order> order;
  TimingReader timings;

  explicit Impl(EndpointOptions given)
      : options(std::move(given)), layout{options.ranks, options.lanes, options.staging_bytes} {
    PYCOMM_CHECK(options.ranks <= kMaxRanks, "a group on CUDA has at most " +
                                                 std::to_string(kMaxRanks) + " ranks, got " +
                                                 std::to_string(options.ranks));
    const DeviceGuard guard(options.device);
    load_kernels();
    order = std::make_unique<Order>();
    if (options.one_address_space) enable_peer_access(options.window.here, options.device);
    const auto lanes = static_cast<std::size_t>(options.lanes);
    const std::size_t mailbox_bytes = sizeof(Mailbox) + lanes * sizeof(LaneMail);
    void* pinned = nullptr;
    PYCOMM_CUDA_CHECK(
        cudaHostAlloc(&pinned, mailbox_bytes, cudaHostAllocMapped | cudaHostAllocPortable));
    mailbox.reset(static_cast<Mailbox*>(std::memset(pinned, 0, mailbox_bytes)));
    PYCOMM_CUDA_CHECK(
        cudaHostGetDevicePointer(reinterpret_cast<void**>(&device_mailbox), pinned, 0));
    regions = std::make_shared<Regions>(options, layout.heap_begin());
  }

  ~Impl() {
    // An error here means that the context is gone.
    int before = 0;
    (void)cudaGetDevice(&before);
    (void)cudaSetDevice(options.device);
    (void)cudaDeviceSynchronize();
    order.reset();
    regions->free_tables();  // the engine of messages may still have the rest
    mailbox.reset();
    (void)cudaSetDevice(before);
  }

  LaneMail& lane(int number) const {
    LaneMail* const first = mailbox->lanes;
    return first[number];
  }

  // The region of a tensor that other ranks may use in place, or null.
  RegionTable region_of(const void* data, std::int64_t bytes) const {
    return options.stage_always ? nullptr : regions->table_of(data, bytes);
  }

  // Fills this rank's part of a launch.
  void put(AnyLaunch& to, int index, const Operation& operation, const void* input, void* output,
           const Extras& extras) const {
    RankLaunch& launch = to.ranks[index];
    launch.operation = operation;
    launch.input = static_cast<std::byte*>(const_cast<void*>(input));
    launch.output = static_cast<std::byte*>(output);
    launch.input_region = region_of(input, input_bytes(operation, options.ranks, options.rank));
    launch.output_region = region_of(output, output_bytes(operation, options.ranks, options.rank));
    launch.window = regions->window();
    launch.windows = regions->windows();
    launch.mailbox = device_mailbox;
    launch.rank = static_cast<std::int16_t>(options.rank);
    launch.captured = extras.capture.has_value();
    launch.number = extras.number;
    launch.bytes = static_cast<std::uint64_t>(operation.count * size_of(operation.dtype));
    to.buckets[index] = extras.bucket;
    to.shardings[index] = extras.sharding;
    to.captures[index] = extras.capture;
  }

  // Returns false if the device has failed: a lane that uses other ranks' tensors then never leaves.
  bool can_run() const {
    (void)cudaSetDevice(options.device);
    const BesideCaptures beside;
    return order->can_run();
  }

  // How many lanes work for an operation: all ranks' lanes, if it is the same on all.
  int lanes_for(const Operation& operation) const {
    if (operation.codec.kind != CodecKind::none || stays_in_node(operation.collective)) {
      return layout.lanes;
    }
    if (fits_packets(operation)) return 1;
    std::int64_t bytes = std::max(input_bytes(operation, layout.ranks, operation.root),
                                  output_bytes(operation, layout.ranks, operation.root));
    const bool reads_all = operation.collective == Collective::all_reduce &&
                           operation.algorithm == Algorithm::one_shot;
    if (reads_all) bytes *= layout.ranks;
    return static_cast<int>(
        std::clamp<std::int64_t>(ceil_div(bytes, options.lane_bytes), 1, layout.lanes));
  }

  AnyLaunch frame(int local_ranks) const {
    AnyLaunch launch;
    launch.layout = layout;
    launch.lanes = layout.lanes;
    launch.timeout_ns = static_cast<std::uint64_t>(std::min(options.timeout, 1e9) * 1e9);
    launch.local_ranks = local_ranks;
    return launch;
  }
};

bool available() { return true; }

std::int64_t window_bytes(int ranks, int lanes, std::int64_t staging_bytes,
                          std::int64_t heap_bytes) {
  return heap_begin(ranks, lanes, staging_bytes) + heap_bytes;
}

// The least that a lane needs: a line per rank, or kBlockElements elements of every rank in the widest
// encoding.
std::int64_t least_staging_bytes(int ranks, int lanes) {
  constexpr std::int64_t kWidest = kLargestBlock * 5;
  return 2 * lanes * std::max(kStagingSlots * ranks * kLine, kStagingSlots * (ranks + 1) * kWidest);
}

std::int64_t heap_begin(int ranks, int lanes, std::int64_t staging_bytes) {
  const std::int64_t least = least_staging_bytes(ranks, lanes);
  PYCOMM_CHECK(staging_bytes >= least, "staging_bytes must be at least " + std::to_string(least) +
                                           " for this world size and number of blocks");
  return WindowLayout{ranks, lanes, staging_bytes}.heap_begin();
}

bool completed(std::uintptr_t event) {
  const BesideCaptures beside;
  const cudaError_t error = cudaEventQuery(reinterpret_cast<cudaEvent_t>(event));
  if (error == cudaErrorNotReady) return false;
  PYCOMM_CUDA_CHECK(error);
  return true;
}

HostRegistration::HostRegistration(int device, std::uintptr_t data, std::int64_t bytes)
    : data_(data) {
  const DeviceGuard guard(device);
  void* host = reinterpret_cast<void*>(data);
  PYCOMM_CUDA_CHECK(cudaHostRegister(host, static_cast<std::size_t>(bytes),
                                     cudaHostRegisterMapped | cudaHostRegisterPortable));
  void* seen = nullptr;
  const cudaError_t error = cudaHostGetDevicePointer(&seen, host, 0);
  if (error != cudaSuccess) (void)cudaHostUnregister(host);
  PYCOMM_CUDA_CHECK(error);
  address_ = reinterpret_cast<std::uintptr_t>(seen);
}

HostRegistration::~HostRegistration() { (void)cudaHostUnregister(reinterpret_cast<void*>(data_)); }

Endpoint::Endpoint(EndpointOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
Endpoint::~Endpoint() = default;
int Endpoint::device() const { return impl_->options.device; }

void Endpoint::extend(Region region) { impl_->regions->add(std::move(region)); }

std::int64_t Endpoint::place_of(std::uintptr_t address, std::int64_t bytes) const {
  return impl_->regions->place_of(reinterpret_cast<const void*>(address), bytes);
}

std::uintptr_t Endpoint::address_of(int rank, std::int64_t place) const {
  const auto r = static_cast<std::size_t>(rank);
  return reinterpret_cast<std::uintptr_t>(impl_->regions->address_of(r, place, 1));
}

void Endpoint::check(const Operation& operation, const void* input) const {
  if (stays_in_node(operation.collective)) {
    PYCOMM_CHECK(impl_->region_of(input, operation.count) != nullptr,
                 std::string("a ") + name_of(operation.collective) +
                     " on CUDA needs memory of group.empty(), which the other ranks' GPUs can use");
  }
  PYCOMM_CHECK(
      operation.algorithm != Algorithm::multicast || impl_->options.window.multicast != 0,
      "algorithm must be auto, one_shot, two_shot, ring or tree in this group, got multicast: "
      "its windows have no multicast address. They have one if the ranks are processes on GPUs "
      "of different numbers behind NVSwitch, with PYCOMM_MULTICAST=1 in their environment before "
      "the group's first operation on CUDA");
  if (operation.codec.kind != CodecKind::topk) return;
  const WindowLayout& layout = impl_->layout;
  const std::int64_t most = preflight_bytes(1) + most_list_bytes(operation, layout.ranks);
  PYCOMM_CHECK(most <= layout.half_bytes(),
               "top-k lists of " + std::to_string(most) +
                   " bytes do not fit the CUDA window, which " + "stages " +
                   std::to_string(layout.half_bytes()) +
                   ": send fewer elements, or make the group with a staging_bytes of at least " +
                   std::to_string(round_up(2 * most, 1 << 20) + (1 << 20)));
}

bool Endpoint::fits(const std::vector<Part>& parts) const {
  std::int64_t most = preflight_bytes(parts.size());
  for (const Part& part : parts) most += most_list_bytes(part.operation, impl_->layout.ranks);
  return most <= impl_->layout.half_bytes();
}

void Endpoint::launch(const Operation& operation, const void* input, void* output,
                      std::uintptr_t stream, const Extras& extras) {
  const DeviceGuard guard(impl_->options.device);
  AnyLaunch launch = impl_->frame(1);
  launch.lanes = impl_->lanes_for(operation);
  impl_->put(launch, 0, operation, input, output, extras);
  impl_->order->launch(launch, stream_of(stream));
}

void Endpoint::synchronize() {
  const DeviceGuard guard(impl_->options.device);
  PYCOMM_CUDA_CHECK(cudaDeviceSynchronize());
}

void Endpoint::set_gone(int r) { __atomic_store_n(&impl_->mailbox->gone[r], 1u, __ATOMIC_RELEASE); }

// Sequentially consistent with the reads of in_peers_heaps(); see BlockComm::enter_heaps().
void Endpoint::set_abort(std::uint64_t word) {
  for (int lane = 0; lane < impl_->options.lanes; ++lane) {
    __atomic_store_n(&impl_->lane(lane).abort, word, __ATOMIC_SEQ_CST);
  }
}

bool Endpoint::in_peers_heaps() const {
  bool inside = false;
  for (int lane = 0; lane < impl_->options.lanes; ++lane) {
    inside = inside || __atomic_load_n(&impl_->lane(lane).in_peers_heaps, __ATOMIC_SEQ_CST) != 0;
  }
  return inside && impl_->can_run();
}

std::optional<std::uint64_t> Endpoint::capture_of(std::uintptr_t stream) const {
  if (stream == 0) return {};  // CUDA captures no default stream
  const DeviceGuard guard(impl_->options.device);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  PYCOMM_CUDA_CHECK(cudaStreamGetCaptureInfo(stream_of(stream), &status, &capture));
  if (status == cudaStreamCaptureStatusNone) return {};
  return capture;
}

DeviceProgress Endpoint::progress() const {
  const std::uint64_t* const words = impl_->mailbox->progress;
  return {__atomic_load_n(&words[0], __ATOMIC_ACQUIRE),
          __atomic_load_n(&words[1], __ATOMIC_ACQUIRE)};
}

std::optional<TimedOperation> Endpoint::next_timed() {
  return impl_->timings.next(impl_->mailbox->timings);
}

Failure Endpoint::failure() const {
  const std::uint64_t word = __atomic_load_n(&impl_->mailbox->failure, __ATOMIC_ACQUIRE);
  if (word == 0) return {};
  const EndpointOptions& options = impl_->options;
  const bool timed_out = reason_of(word) == Reason::timeout;  // a kernel of this rank timed out
  return {reason_of(word),
          rank_of(word),
          timed_out ? timeout_word(rank_of(word), options.rank, options.timeout) : word,
          impl_->mailbox->number,
          impl_->mailbox->first,
          impl_->mailbox->other};
}

std::shared_ptr<DeviceCopies> Endpoint::message_copies() const {
  const EndpointOptions& options = impl_->options;
  return std::make_shared<MessageCopies>(options.device, options.rank, impl_->regions,
                                         Range{impl_->layout.heap_begin(), options.message_bytes});
}

struct SharedLaunch::Impl {
  std::vector<std::shared_ptr<Endpoint>> endpoints;
  AnyLaunch launch;
  std::vector<cudaStream_t> streams;
  std::deque<Event> arrived;
  std::mutex mutex;  // guards the members below
  std::optional<Event> done;
  cudaStream_t leader = nullptr;  // the stream of the latest launch
  std::unique_ptr<Order> order;
};

SharedLaunch::SharedLaunch(std::vector<std::shared_ptr<Endpoint>> endpoints)
    : impl_(std::make_unique<Impl>()) {
  PYCOMM_CHECK(!endpoints.empty() && endpoints.size() <= kMaxLocalRanks,
               "one device holds at most " + std::to_string(kMaxLocalRanks) + " ranks, got " +
                   std::to_string(endpoints.size()));
  impl_->endpoints = std::move(endpoints);
  const auto ranks = impl_->endpoints.size();
  const DeviceGuard guard(impl_->endpoints[0]->impl_->options.device);
  impl_->launch = impl_->endpoints[0]->impl_->frame(static_cast<int>(ranks));
  impl_->order = std::make_unique<Order>();
  impl_->streams.resize(ranks);
  while (impl_->arrived.size() < ranks) impl_->arrived.emplace_back();
  impl_->done.emplace();
}

SharedLaunch::~SharedLaunch() = default;

void SharedLaunch::put(int rank, const Operation& operation, const void* input, void* output,
                       std::uintptr_t stream, const Extras& extras) {
  const auto r = static_cast<std::size_t>(rank);
  const Endpoint::Impl& endpoint = *impl_->endpoints[r]->impl_;
  const DeviceGuard guard(endpoint.options.device);
  endpoint.put(impl_->launch, rank, operation, input, output, extras);
  impl_->streams[r] = stream_of(stream);
  // The default stream is one for all threads, and nearly always the leader's.
  if (stream != 0) PYCOMM_CUDA_CHECK(cudaEventRecord(impl_->arrived[r], impl_->streams[r]));
}

void SharedLaunch::launch(const std::function<bool()>& given_up) {
  const std::lock_guard lock(impl_->mutex);
  if (given_up()) return;
  const Endpoint::Impl& first = *impl_->endpoints[0]->impl_;
  const DeviceGuard guard(first.options.device);
  impl_->launch.lanes = first.lanes_for(impl_->launch.ranks[0].operation);
  const cudaStream_t leader = impl_->leader = impl_->streams[0];
  bool followed = false;
  for (std::size_t r = 1; r < impl_->streams.size(); ++r) {
    if (impl_->streams[r] == leader) continue;
    if (impl_->streams[r] == nullptr) {
      PYCOMM_CUDA_CHECK(cudaEventRecord(impl_->arrived[r], nullptr));
    }
    PYCOMM_CUDA_CHECK(cudaStreamWaitEvent(leader, impl_->arrived[r], 0));
    followed = true;
  }
  impl_->order->launch(impl_->launch, leader);
  if (followed) PYCOMM_CUDA_CHECK(cudaEventRecord(*impl_->done, leader));
}

void SharedLaunch::follow(int rank) {
  const auto r = static_cast<std::size_t>(rank);
  const std::lock_guard lock(impl_->mutex);
  if (impl_->streams[r] == impl_->leader) return;
  const DeviceGuard guard(impl_->endpoints[r]->impl_->options.device);
  PYCOMM_CUDA_CHECK(cudaStreamWaitEvent(impl_->streams[r], *impl_->done, 0));
}

}  // namespace pycomm::cuda
