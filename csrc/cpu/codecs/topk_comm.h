// The CPU executor of top-k (core/algorithms/topk_exchange.h).
//
//   stage()   cuts the selected elements of a region to its capacity and encodes them where the owner
//             reads them. What is sent is taken out of residual and velocity.
//   reduce()  adds the lists of this rank's region, selects the region's share of the sums and encodes
//             it. The rest of the sums goes into the owner's residual.
//   gather()  decodes an owner's list into the output.
//
// The lists lie in the rank's heap, in one area for odd and one for even operations, for the same reason
// as announcements (core/operation.h). Sums are formed in one tile of 65,536 elements.
#pragma once

#include "core/algorithms/topk_exchange.h"
#include "cpu/codecs/coded_comm.h"
#include "cpu/codecs/topk_select.h"
#include "cpu/codecs/topk_wire.h"

namespace pycomm::cpu {

// Larger outputs are written around the caches, which could not hold them.
inline constexpr std::int64_t kCachedOutput = 8 << 20;

struct TopkBuffers {
  TopkSelection selection;
  std::vector<float> sums;  // all zero between uses
  std::vector<std::byte> chunk;
  std::vector<Entry> list;
  std::vector<std::uint32_t> magnitudes;
};

// Memory that a group keeps from one top-k operation to the next. When the group is destroyed, its areas
// stay allocated as long as the window: a peer may still read them after this rank has left.
class TopkWorkspace : public TopkBuffers {
 public:
  explicit TopkWorkspace(std::shared_ptr<Heap> heap) : heap_(std::move(heap)) {}

  // This rank's area for the operation with this number; it has at least `bytes` bytes.
  std::byte* area(std::uint32_t sequence, std::int64_t bytes);
  // Frees the areas that no peer can still read after the operation with this number.
  void trim(std::uint32_t sequence);

 private:
  struct Area {
    std::byte* data = nullptr;
    std::int64_t bytes = 0;
    std::uint32_t used = 0;  // the number of the last operation
  };
  void free(Area& area);

  std::shared_ptr<Heap> heap_;
  Area areas_[2];
};

template <class Base>
class TopkComm {
 public:
  // Prepares the selection; the caller then begins the operation on `comm`, with areas as tensors.
  // `operation` is the call's with its algorithm resolved; `limit` is largest_safe().
  TopkComm(Base& comm, TopkWorkspace& workspace, const Operation& operation, const Call& call,
           float limit);
  // This rank's preflight; after announce(), the combined preflight of all ranks.
  Preflight preflight() const { return preflight_; }
  // Bytes of rank r's area.
  std::int64_t area_bytes(int r) const { return area_.bytes(r); }
  // The address and bytes of a list that a rank has written for an owner, or of a result for all.
  std::byte* list(int r, int owner, bool result) const {
    return areas_[static_cast<std::size_t>(r)] + (result ? area_.result() : area_.list(owner));
  }
  std::int64_t room(int owner, bool result) const { return area_.room(owner, result); }
  std::int64_t list_bytes(int owner, bool result) const {
    return TopkReader(region(owner), operation_.codec.values, list(rank(), owner, result),
                      room(owner, result))
        .bytes();
  }

  int rank() const { return comm_.rank(); }
  int size() const { return comm_.size(); }
  void announce();
  void signal(int channel)
    requires Signaller<Base>
  {
    comm_.signal(channel);
  }
  void wait_all(int channel, std::int64_t step)
    requires Signaller<Base>
  {
    comm_.wait_all(channel, step);
  }
  void stage(int owner);
  void reduce();
  void gather(int owner);

  // True if a value was not finite. After the algorithm has run, all ranks agree.
  bool nonfinite() const { return nonfinite_ || preflight_.overflow != 0; }

 private:
  TopkRegion region(int owner) const { return area_.region(owner); }
  TopkReader reader(int r, int owner, bool result);
  // Reads a list that rank r has written; its content is not trusted.
  template <class Read>
  auto reading(int r, Read read) {
    try {
      return read();
    } catch (const std::invalid_argument& error) {
      comm_.blame(r, error.what());
    }
  }
  bool feeds() const {
    return feedback_.residual != nullptr && preflight_.overflow == 0 && preflight_.unused == 0;
  }
  void add_chunk(std::int64_t chunk);
  void write_result();
  template <class T>
  void scatter(const TopkReader& list, const TopkRegion& region);
  float as_stored(float value) const;

  Base& comm_;
  TopkWorkspace& workspace_;
  const Operation& operation_;
  const Feedback& feedback_;
  Candidates candidates_;
  const float limit_;
  void* output_;
  TopkArea area_;
  Preflight preflight_;
  bool nonfinite_ = false;
  std::vector<std::byte*> areas_;  // every rank's
  std::vector<TopkReader> readers_;
};

static_assert(ListExecutor<TopkComm<Comm>>);

}  // namespace pycomm::cpu
