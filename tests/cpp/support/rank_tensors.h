// The tensors of an operation's ranks: on the CPU, and where a rank of a MappedWorld has them.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "core/algorithms/table.h"
#include "core/codecs/feedback.h"
#include "core/reduce.h"
#include "cuda/codecs/wire.h"
#include "support/dice.h"
#include "support/mapped_world.h"
#include "support/world.h"

namespace pycomm::test {

using Bytes = std::vector<std::byte>;

// How random floats look; other types have random bits.
enum class Numbers { normal, whole };

inline Bytes random_elements(DType dtype, std::int64_t count, Dice& dice,
                             Numbers numbers = Numbers::normal) {
  Bytes made(static_cast<std::size_t>(count * size_of(dtype)));
  for (std::byte& byte : made) byte = static_cast<std::byte>(dice());
  visit_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    if constexpr (std::is_floating_point_v<accumulator_t<T>>) {
      for (std::int64_t i = 0; i < count; ++i) {
        const float drawn = normal(dice);
        const float number = numbers == Numbers::whole ? std::round(4 * drawn) : drawn;
        const T value = store<T>(static_cast<accumulator_t<T>>(number));
        std::memcpy(made.data() + i * size_of(dtype), &value, sizeof(T));
      }
    }
  });
  return made;
}

// What every rank passes to an operation, and gets.
struct Tensors {
  Tensors(const Operation& operation, int n, unsigned seed, Numbers numbers = Numbers::normal) {
    Dice dice(seed);
    const std::int64_t most = operation.count * (reduces_or_moves_one(operation) ? 1 : n);
    for (int r = 0; r < n; ++r) {
      x.push_back(random_elements(operation.dtype, most, dice, numbers));
      y.push_back(random_elements(operation.dtype, most, dice, numbers));
      std::vector<float> values(static_cast<std::size_t>(operation.count));
      for (float& value : values) value = 0.01f * normal(dice);
      residual.push_back(values);
      velocity.push_back(std::move(values));
    }
  }

  Feedback feedback(const Operation& operation, int r, std::int64_t begin = 0) {
    Feedback made;
    made.seed = 77;
    made.step = 5;
    made.hold_unused = hold_unused;
    if (operation.codec.feedback == 0) return made;
    made.residual = residual[r].data() + begin;
    if (operation.codec.kind == CodecKind::topk) {
      made.velocity = velocity[r].data();
      made.momentum = 0.9f;
    }
    return made;
  }

  static bool reduces_or_moves_one(const Operation& operation) {
    return operation.collective == Collective::all_reduce ||
           operation.collective == Collective::broadcast ||
           operation.collective == Collective::reduce;
  }

  // A broadcast's input is always its output.
  std::byte* input(const Operation& operation, std::byte* x, std::byte* y) const {
    return in_place || operation.collective == Collective::broadcast ? y : x;
  }

  bool in_place = false;
  bool hold_unused = false;
  std::vector<Bytes> x, y;
  std::vector<std::vector<float>> residual, velocity;
};

inline bool has_codec(const Operation& operation) {
  return operation.codec.kind != CodecKind::none;
}

// What the CPU makes of it. Ring and tree cut what a lane has, so each lane is a tensor of its own. The
// CPU has no multicast: its exact sums are two-shot's.
inline void run_on_host(const Operation& operation, World& hosts, Tensors& tensors) {
  const bool in_switch = operation.algorithm == Algorithm::multicast;
  const bool by_lane = operation.collective == Collective::all_reduce && !in_switch &&
                       Algorithms::partial_sums(operation.algorithm) && hosts.size() > 1;
  const std::int64_t size = size_of(operation.dtype);
  const std::int64_t unit = has_codec(operation) ? kLargestBlock : kLine / size;
  for (int lane = 0; lane < (by_lane ? kLanes : 1); ++lane) {
    const Range part = part_of(operation.count, by_lane ? kLanes : 1, lane, unit);
    Operation each = operation;
    if (in_switch) each.algorithm = Algorithm::two_shot;
    each.count = part.count;
    each.offset += static_cast<std::uint32_t>(part.begin / kSmallestBlock);
    hosts.run([&](int r) {
      std::byte* const y = tensors.y[r].data() + part.begin * size;
      hosts[r].run(each, tensors.input(operation, tensors.x[r].data() + part.begin * size, y), y,
                   nullptr, tensors.feedback(operation, r, part.begin));
    });
  }
}

// Where a rank's tensors lie: `aligned` at other places of each heap, `alike` at the same ones.
enum class Room { heap, outside, mixed, aligned, alike };

// A copy of a tensor at any address that its type allows.
class Placed {
 public:
  Placed(const Bytes& from, std::byte* heap, std::int64_t shift) : size_(from.size()) {
    if (heap == nullptr) {
      own_.resize(size_ + 64);
      heap =
          reinterpret_cast<std::byte*>(round_up(reinterpret_cast<std::intptr_t>(own_.data()), 16));
    }
    data_ = heap + shift;
    std::memcpy(data_, from.data(), size_);
  }
  Placed(Placed&&) = default;

  std::byte* data() const { return data_; }
  Bytes bytes() const { return {data_, data_ + size_}; }
  bool operator==(const Bytes& other) const {
    return other.size() == size_ && std::memcmp(data_, other.data(), size_) == 0;
  }

 private:
  std::size_t size_;
  Bytes own_;
  std::byte* data_;
};

// An operation's tensors in a MappedWorld, and what else its kernels need.
class OnDevice {
 public:
  OnDevice(const Operation& operation, const Tensors& tensors, const MappedWorld& world, Room room,
           unsigned seed)
      : operation_(operation), tensors_(tensors) {
    operation_.device = Device::cuda;
    const int n = static_cast<int>(tensors.x.size());
    for (int r = 0; r < n; ++r) {
      const bool inside = room != Room::outside && (room != Room::mixed || r != 0);
      const auto place = [&](const Bytes& from, int which) {
        const std::int64_t unit = room == Room::alike     ? 0
                                  : room == Room::aligned ? 16
                                                          : size_of(operation.dtype);
        const std::int64_t shift = (seed + static_cast<unsigned>(r + which)) % 3 * unit;
        const std::int64_t half = world.heap_bytes() / 2;
        PYCOMM_CHECK(static_cast<std::int64_t>(from.size()) + 64 <= half, "the heap is too small");
        std::byte* const heap = world.heap(r) + which * half;
        return Placed(from, inside ? heap : nullptr, shift);
      };
      x_.push_back(place(tensors.x[r], 0));
      y_.push_back(place(tensors.y[r], 1));
      workspaces_.emplace_back(static_cast<std::size_t>(cuda::workspace_bytes({{operation}}, n)));
    }
  }

  void launch(int r, cuda::Endpoint& endpoint, cudaStream_t stream = nullptr) {
    const auto* const input = tensors_.input(operation_, x_[r].data(), y_[r].data());
    const auto handle = reinterpret_cast<std::uintptr_t>(stream);
    cuda::Extras extras(
        cuda::Bucket{{{operation_, input, y_[r].data(), tensors_.feedback(operation_, r)}},
                     nullptr,
                     workspaces_[r].data()});
    extras.capture = endpoint.capture_of(handle);
    endpoint.launch(operation_, input, y_[r].data(), handle, extras);
  }

  Bytes result(int r) const { return y_[static_cast<std::size_t>(r)].bytes(); }
  bool has_result(int r, const Bytes& wanted) const {
    return y_[static_cast<std::size_t>(r)] == wanted;
  }

  // Fails unless rank r has these tensors.
  void expect(int r, const Tensors& want, const std::string& when) const {
    const std::string what = describe(operation_) + " of rank " + std::to_string(r) + when;
    PYCOMM_CHECK(x_[r] == want.x[r], what + ": the input stays");
    PYCOMM_CHECK(y_[r] == want.y[r], what + ": result");
    PYCOMM_CHECK(tensors_.residual[r] == want.residual[r], what + ": residual");
    PYCOMM_CHECK(tensors_.velocity[r] == want.velocity[r], what + ": velocity");
  }

 private:
  Operation operation_;
  Tensors tensors_;
  std::vector<Placed> x_, y_;
  std::vector<Bytes> workspaces_;
};

}  // namespace pycomm::test
