// One rank's CUDA side: its window, its kernels, and how they fail. Host code; no torch.
//
// In a build without CUDA, no_cuda.cpp replaces it, and creating an Endpoint throws.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "core/device_copies.h"
#include "core/operation.h"
#include "core/record.h"
#include "core/signal.h"
#include "cuda/codecs/bucket.h"
#include "cuda/layout.h"

namespace pycomm::cuda {

// Memory that all ranks have, in equal sizes: their windows, or what was added to the windows' heaps.
struct Region {
  std::int64_t bytes = 0;             // of a rank
  std::vector<std::uintptr_t> here;   // every rank's, as this device sees it
  std::vector<std::uintptr_t> there;  // this rank's, as every rank's device sees it; unused if the
                                      // ranks are threads
  std::uintptr_t multicast = 0;  // where this device reaches all ranks' at once; 0 if it cannot
};

struct EndpointOptions {
  int device;
  int rank;
  int ranks;
  int lanes;                   // blocks per rank
  std::int64_t staging_bytes;  // per rank
  double timeout;              // seconds
  Region window;               // heap included; zeroed
  bool one_address_space;      // ranks are threads, so every rank can read any tensor of another
  bool stage_always;           // never zero copy
  std::int64_t lane_bytes = kLaneBytes;  // see lanes_for()
  std::int64_t message_bytes = 0;        // at the beginning of the heap, for pieces of messages
};

// How a kernel failed; `reason` is none if none did. If the host has aborted the group, the host
// knows whom to blame, and `rank` is the kernel's own.
struct Failure {
  Reason reason;
  int rank;
  std::uint64_t abort_word;  // for the other ranks
  std::uint32_t number;      // of the launch
  Operation
      first;  // what failed; for a mismatch, rank 0's operation, and `other` is that of `rank`
  Operation other;
};

// What a rank passes to an operation apart from its tensors. A compressed one takes its tensors from the
// bucket.
struct Extras {
  Extras() = default;
  Extras(Bucket given) : bucket(std::move(given)) {}
  Extras(const Sharding& given) : sharding(given) {}

  Bucket bucket;
  Sharding sharding;
  std::uint32_t number = 0;              // of the launch, as records know it
  std::optional<std::uint64_t> capture;  // what the stream is in; see Endpoint::capture_of()
};

// False in a build without CUDA.
bool available();
// The least staging that is enough for every operation except top-k.
std::int64_t least_staging_bytes(int ranks, int lanes);
// Bytes of a window with this much staging and heap.
std::int64_t window_bytes(int ranks, int lanes, std::int64_t staging_bytes,
                          std::int64_t heap_bytes);
std::int64_t heap_begin(int ranks, int lanes, std::int64_t staging_bytes);

// True if all work that an event has recorded is complete. Unlike torch's query, this does not break a
// capture on another thread.
bool completed(std::uintptr_t event);

// Pins a range of host memory for a device during the object's lifetime.
class HostRegistration {
 public:
  HostRegistration(int device, std::uintptr_t data, std::int64_t bytes);
  ~HostRegistration();
  HostRegistration(const HostRegistration&) = delete;
  HostRegistration& operator=(const HostRegistration&) = delete;

  // The range's address on the device.
  std::uintptr_t address() const { return address_; }

 private:
  [[maybe_unused]] std::uintptr_t data_;  // unused in builds without CUDA
  std::uintptr_t address_ = 0;
};

class Endpoint {
 public:
  explicit Endpoint(EndpointOptions options);
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  int device() const;
  // Adds memory to the ranks' heaps. Graphs that have been captured stay valid. No rank may use a tensor
  // there before all ranks have returned.
  void extend(Region region);
  // Where others find memory of this rank, a number that is the same on all; kNotInWindow if they do not
  // reach it. And the address of a rank's memory here.
  std::int64_t place_of(std::uintptr_t address, std::int64_t bytes) const;
  std::uintptr_t address_of(int rank, std::int64_t place) const;
  // Throws std::invalid_argument if the window is too small for the operation, or must hold its input
  // and does not.
  void check(const Operation& operation, const void* input) const;
  // True if the lists of a top-k bucket fit into the window together.
  bool fits(const std::vector<Part>& parts) const;
  // Enqueues this rank's kernel on the stream, after the previous one, and returns. A graph can
  // capture it; the caller then orders it with operations outside of the graph.
  void launch(const Operation& operation, const void* input, void* output, std::uintptr_t stream,
              const Extras& extras = {});

  // Returns when all work on the device is done.
  void synchronize();
  // The host tells kernels; may be called at any time.
  void set_gone(int r);
  void set_abort(std::uint64_t word);
  // After set_abort(): true if a kernel may still use tensors of other ranks. Once false, it stays
  // false. Call it on a thread that uses no other device.
  bool in_peers_heaps() const;
  // The capture that the stream is in, if any: what is enqueued on it becomes part of a graph.
  std::optional<std::uint64_t> capture_of(std::uintptr_t stream) const;
  // How far the device is. From any thread; waits for nothing.
  DeviceProgress progress() const;
  // The next operation that the device has ended. One thread at a time may ask; waits for nothing.
  std::optional<TimedOperation> next_timed();
  // The failure that a kernel has reported to the host.
  Failure failure() const;
  // What moves messages. It lives as long as it is used, the windows must, too.
  std::shared_ptr<DeviceCopies> message_copies() const;

 private:
  friend class SharedLaunch;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Ranks that are threads and share one device share one launch, so that their blocks are resident
// together. Each rank puts its part; when all have, rank 0 launches; the others follow, so that the
// next work on their streams runs after the launch. The caller synchronizes the ranks on the host.
class SharedLaunch {
 public:
  explicit SharedLaunch(std::vector<std::shared_ptr<Endpoint>> endpoints);
  ~SharedLaunch();
  SharedLaunch(const SharedLaunch&) = delete;
  SharedLaunch& operator=(const SharedLaunch&) = delete;

  void put(int rank, const Operation& operation, const void* input, void* output,
           std::uintptr_t stream, const Extras& extras = {});
  // Does not launch if a rank has given up. Such a rank says so first, then follows a launch that may
  // already have happened.
  void launch(const std::function<bool()>& given_up = [] { return false; });
  void follow(int rank);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace pycomm::cuda
