// Ranks that run a given body, on both executors.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "cpu/executor/comm.h"
#include "cuda/codecs/bucket.cuh"

namespace pycomm::test {

// Ranks as threads.
class CpuRanks {
 public:
  explicit CpuRanks(int n, std::int64_t staging_bytes) {
    const std::int64_t slice = (std::int64_t{1} << 20) + staging_bytes;
    const int fd = cpu::Window::create(n, slice, staging_bytes);
    const auto window = std::make_shared<cpu::Window>(fd, n, slice, staging_bytes);
    const auto size = static_cast<std::size_t>(n);
    const auto peers = std::make_shared<const cpu::Liveness>(
        std::vector<int>(size), std::vector<std::shared_ptr<cpu::Process>>(size));
    for (int r = 0; r < n; ++r) {
      comms_.push_back(std::make_unique<cpu::Comm>(window, peers, r, n, 2, std::chrono::seconds(60),
                                                   0xffffffe0u));
    }
  }

  // Calls body(comm, rank) on a thread per rank.
  void run(const std::function<void(cpu::Comm&, std::size_t)>& body) {
    std::vector<std::thread> threads;
    std::atomic<bool> failed = false;
    for (std::size_t r = 0; r < comms_.size(); ++r) {
      threads.emplace_back([&, r] {
        try {
          body(*comms_[r], r);
        } catch (const CollectiveError&) {
          failed = true;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    PYCOMM_CHECK(!failed, "a rank failed");
  }

 private:
  std::vector<std::unique_ptr<cpu::Comm>> comms_;
};

// Ranks that share a kernel launch, which runs on the CPU (device/cuda_runtime.h).
class DeviceRanks {
 public:
  static constexpr int kLanes = 2;

  explicit DeviceRanks(int n, std::int64_t staging_bytes)
      : windows_(static_cast<std::size_t>(n)), mailboxes_(n), buckets_(n), workspaces_(n) {
    launch_.layout = {n, kLanes, staging_bytes};
    launch_.timeout_ns = 60'000'000'000;
    launch_.lanes = kLanes;
    launch_.local_ranks = n;
    for (int r = 0; r < n; ++r) {
      memory_.emplace_back(static_cast<std::size_t>(launch_.layout.heap_begin()) / sizeof(Line));
      windows_[static_cast<std::size_t>(r)] = reinterpret_cast<std::byte*>(memory_.back().data());
    }
  }

  // Sets rank r's part of the next launch.
  void put(std::size_t r, const Operation& operation, const void* in, void* out,
           const Feedback& feedback = {}) {
    launch_.ranks[r] = {operation,
                        static_cast<std::byte*>(const_cast<void*>(in)),
                        static_cast<std::byte*>(out),
                        nullptr,
                        nullptr,
                        windows_[r],
                        windows_.data(),
                        &mailboxes_[r].mailbox,
                        static_cast<std::int16_t>(r),
                        false,
                        1,
                        static_cast<std::uint64_t>(operation.count * size_of(operation.dtype))};
    buckets_[r].parts = {{operation, in, out, feedback}};
    workspaces_[r].resize(
        static_cast<std::size_t>(cuda::workspace_bytes(buckets_[r].parts, launch_.layout.ranks)));
    buckets_[r].workspace = workspaces_[r].data();
  }
  // Calls body(launch).
  void run(const std::function<void(const cuda::Launch&)>& body) {
    body(launch_);
    for (const auto& rank : mailboxes_) PYCOMM_CHECK(rank.mailbox.failure == 0, "a kernel failed");
  }

  const cuda::Bucket* buckets() const { return buckets_.data(); }

 private:
  struct alignas(4096) Line {
    std::byte bytes[4096];
  };
  struct RankMailbox {
    cuda::Mailbox mailbox;
    cuda::LaneMail more_lanes[kLanes - 1];  // continues the mailbox's last member
  };

  std::vector<std::vector<Line>> memory_;
  std::vector<std::byte*> windows_;
  std::vector<RankMailbox> mailboxes_;
  std::vector<cuda::Bucket> buckets_;
  std::vector<std::vector<std::byte>> workspaces_;
  cuda::Launch launch_{};
};

}  // namespace pycomm::test
