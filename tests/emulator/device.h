// What the emulated device's parts share: memory, streams, and their order.
#pragma once

#include <ATen/ATen.h>

#include "cuda_runtime.h"
#include "stream_order.h"

namespace emulator {

inline constexpr c10::DeviceIndex kDevices = 4;

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override;
  void copy_data(void* to, const void* from, std::size_t bytes) const override;
};
extern Memory memory;
extern StreamOrder order;

c10::Stream current_stream(c10::Device device = c10::Device(c10::kCUDA));
cudaStream_t native(const c10::Stream& stream);
Line line_of(const c10::Stream& stream);
bool is_captured(const c10::Stream& stream);

// The host waits for a device, which raises an error after torch.cuda.set_sync_debug_mode("error").
void wait();

}  // namespace emulator
