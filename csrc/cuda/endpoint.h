// One rank's CUDA side: its window, its kernels, and how they fail. Host code; no torch.
//
// In a build without CUDA, no_cuda.cpp replaces it, and creating an Endpoint throws.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/operation.h"
#include "core/signal.h"
#include "cuda/layout.h"

namespace pycomm::cuda {

struct EndpointOptions {
  int device;
  int rank;
  int ranks;
  int lanes;                            // blocks per rank
  std::int64_t staging_bytes;           // per rank
  std::int64_t window_bytes;            // the whole window, heap included
  double timeout;                       // seconds
  std::vector<std::uintptr_t> windows;  // every rank's window, as this device sees it; zeroed
  bool one_address_space;               // ranks are threads: any tensor of a rank is everyone's
  bool stage_always;                    // never use tensors where they lie
};

// How a kernel failed; `reason` is none if none did. If the host has aborted the group, the host
// knows whom to blame, and `rank` is the kernel's own.
struct Failure {
  Reason reason;
  int rank;
  std::uint64_t abort_word;  // for the other ranks
  std::uint32_t sequence;
  Operation first;  // what failed; of a mismatch: what rank 0 called, and what `rank`
  Operation other;
};

// The least staging that is enough for every operation except top-k.
std::int64_t least_staging_bytes(int ranks, int lanes);
// Bytes of a window with this much staging and heap.
std::int64_t window_bytes(int ranks, int lanes, std::int64_t staging_bytes,
                          std::int64_t heap_bytes);
std::int64_t heap_begin(int ranks, int lanes, std::int64_t staging_bytes);

// A range of host memory, pinned for a device while it lives.
class HostRegistration {
 public:
  HostRegistration(int device, std::uintptr_t data, std::int64_t bytes);
  ~HostRegistration();
  HostRegistration(const HostRegistration&) = delete;
  HostRegistration& operator=(const HostRegistration&) = delete;

  // Where the device sees it.
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

  // Throws std::invalid_argument if the window is too small for it.
  void check(const Operation& operation) const;
  // Enqueues this rank's kernel on the stream, behind the one before, and returns. Capturable in a
  // graph, where the order against operations outside is the caller's.
  void launch(const Operation& operation, const void* input, void* output, std::uintptr_t stream,
              const Compression& compression = {});

  // Returns when everything on the device has run.
  void synchronize();
  // From the host to kernels, at any time.
  void set_gone(int r);
  void set_abort(std::uint64_t word);
  // After set_abort(): whether a kernel may still use tensors of other ranks; once none does, none
  // ever will. On a thread that uses no other device.
  bool in_peers_heaps() const;
  // From the kernels to the host.
  Failure failure() const;

 private:
  friend class SharedLaunch;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Ranks that are threads and share one device also share one launch, so that their blocks are
// resident together: each rank puts its part, then, when all have, rank 0 launches, and the others
// follow: what is on their streams next runs behind it. Who waits for whom on the host is the
// caller's business.
class SharedLaunch {
 public:
  explicit SharedLaunch(std::vector<std::shared_ptr<Endpoint>> endpoints);
  ~SharedLaunch();
  SharedLaunch(const SharedLaunch&) = delete;
  SharedLaunch& operator=(const SharedLaunch&) = delete;

  void put(int rank, const Operation& operation, const void* input, void* output,
           std::uintptr_t stream, const Compression& compression = {});
  // Unless a rank has given up. A rank that has says so first, and then follows what may have been
  // launched before.
  void launch(const std::function<bool()>& given_up = [] { return false; });
  void follow(int rank);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace pycomm::cuda
