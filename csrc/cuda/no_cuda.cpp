// Stands in for endpoint.cu, codecs/wire.cu, codecs/topk_wire.cu, and of optim/ device_words.cu, sharded.cu
// and step.cu, in builds without CUDA.
#include <stdexcept>

#include "cuda/codecs/wire.h"
#include "cuda/endpoint.h"
#include "cuda/optim/sharded.h"
#include "cuda/optim/step.h"

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

bool available() { return false; }
std::int64_t least_staging_bytes(int, int) { unavailable(); }
std::int64_t window_bytes(int, int, std::int64_t, std::int64_t) { unavailable(); }
std::int64_t heap_begin(int, int, std::int64_t) { unavailable(); }
bool completed(std::uintptr_t) { unavailable(); }
HostRegistration::HostRegistration(int, std::uintptr_t, std::int64_t) { unavailable(); }
HostRegistration::~HostRegistration() = default;
Endpoint::Endpoint(EndpointOptions) { unavailable(); }
Endpoint::~Endpoint() = default;
int Endpoint::device() const { unavailable(); }
void Endpoint::extend(Region) { unavailable(); }
std::int64_t Endpoint::place_of(std::uintptr_t, std::int64_t) const { unavailable(); }
std::uintptr_t Endpoint::address_of(int, std::int64_t) const { unavailable(); }
void Endpoint::check(const Operation&, const void*) const { unavailable(); }
bool Endpoint::fits(const std::vector<Part>&) const { unavailable(); }
void Endpoint::launch(const Operation&, const void*, void*, std::uintptr_t, const Extras&) {
  unavailable();
}
void Endpoint::synchronize() { unavailable(); }
void Endpoint::set_gone(int) { unavailable(); }
void Endpoint::set_abort(std::uint64_t) { unavailable(); }
bool Endpoint::in_peers_heaps() const { unavailable(); }
std::optional<std::uint64_t> Endpoint::capture_of(std::uintptr_t) const { unavailable(); }
DeviceProgress Endpoint::progress() const { unavailable(); }
std::optional<TimedOperation> Endpoint::next_timed() { unavailable(); }
Failure Endpoint::failure() const { unavailable(); }
std::shared_ptr<DeviceCopies> Endpoint::message_copies() const { unavailable(); }
SharedLaunch::SharedLaunch(std::vector<std::shared_ptr<Endpoint>>) { unavailable(); }
SharedLaunch::~SharedLaunch() = default;
void SharedLaunch::put(int, const Operation&, const void*, void*, std::uintptr_t, const Extras&) {
  unavailable();
}
void SharedLaunch::launch(const std::function<bool()>&) { unavailable(); }
void SharedLaunch::follow(int) { unavailable(); }
void encode(const WireJob&) { unavailable(); }
void decode(const WireJob&, std::int64_t, bool, bool) { unavailable(); }
std::int64_t select(const WireJob&, std::int64_t*, float*) { unavailable(); }
std::int64_t workspace_bytes(const Codec&, std::int64_t) { unavailable(); }
std::int64_t workspace_bytes(const std::vector<Part>&, int) { unavailable(); }
std::int64_t SegmentTable::set(const std::vector<Segment>&) { unavailable(); }
void DeviceWords::upload(void*, int, std::uintptr_t) { unavailable(); }
std::int64_t ShardTable::set(const ShardedStep&) { unavailable(); }
Call step_call(const ShardedStep&, const std::string&) { unavailable(); }
void grad_norm(const StepJob&, const GradNormPass&) { unavailable(); }
void step(const StepJob&, const ParamRange&) { unavailable(); }

}  // namespace pycomm::cuda
