// The twin of endpoint.cu in builds without CUDA.
#include <stdexcept>

#include "cuda/endpoint.h"

namespace pycomm::cuda {
namespace {

[[noreturn]] void unavailable() {
  throw std::runtime_error(
      "this build of pycomm has no CUDA: build it where nvcc and a CUDA build of torch are "
      "installed, with PYCOMM_CUDA=1");
}

}  // namespace

struct Endpoint::Impl {};
struct SharedLaunch::Impl {};

std::int64_t window_bytes(int, int, std::int64_t, std::int64_t) { unavailable(); }
std::int64_t heap_begin(int, int, std::int64_t) { unavailable(); }
HostRegistration::HostRegistration(int, std::uintptr_t, std::int64_t) { unavailable(); }
HostRegistration::~HostRegistration() = default;
Endpoint::Endpoint(EndpointOptions) { unavailable(); }
Endpoint::~Endpoint() = default;
void Endpoint::launch(const Operation&, const void*, void*, std::uintptr_t) { unavailable(); }
void Endpoint::synchronize() { unavailable(); }
void Endpoint::set_gone(int) { unavailable(); }
void Endpoint::set_abort(std::uint64_t) { unavailable(); }
Failure Endpoint::failure() const { unavailable(); }
SharedLaunch::SharedLaunch(std::vector<std::shared_ptr<Endpoint>>) { unavailable(); }
SharedLaunch::~SharedLaunch() = default;
void SharedLaunch::put(int, const Operation&, const void*, void*, std::uintptr_t) { unavailable(); }
void SharedLaunch::launch() { unavailable(); }
void SharedLaunch::follow(int) { unavailable(); }

}  // namespace pycomm::cuda
