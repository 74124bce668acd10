// The CPU executor of two-shot with top-k: one tile, whose chunks are the regions of the owners.
//
//   1. Stage: select k elements, cut each region's list to its capacity, encode it where the owner
//      reads it. What is sent is taken out of residual and velocity.
//   2. Reduce: for its region, the owner adds the lists in rank order, selects its share of the sums
//      and encodes it; what it does not select goes into its residual.
//   3. Gather: decode the other owners' lists.
//
// The lists lie in the rank's heap, in two areas for odd and even operations, for the reason why
// announcements do (core/operation.h). Sums are made in one tile of 65,536 elements.
#pragma once

#include "core/two_shot.h"
#include "cpu/coded_comm.h"
#include "cpu/topk_select.h"
#include "cpu/topk_wire.h"

namespace pycomm::cpu {

// An output of more bytes than that is written around the caches, which could not hold it.
inline constexpr std::int64_t kCachedOutput = 8 << 20;

struct TopkBuffers {
  TopkSelection selection;
  std::vector<float> sums;  // all zero between uses
  std::vector<std::byte> chunk;
  std::vector<Entry> list;
  std::vector<std::uint32_t> magnitudes;
};

// Memory that a group keeps from one top-k operation to the next. Areas that are still there when the
// group goes stay as long as the window: a peer may still read them when this rank has left.
class TopkWorkspace : public TopkBuffers {
 public:
  explicit TopkWorkspace(std::shared_ptr<Heap> heap) : heap_(std::move(heap)) {}

  // This rank's area for the operation of this number, of at least so many bytes.
  std::byte* area(std::uint32_t sequence, std::int64_t bytes);
  // Gives back all that no peer may still read after the operation of this number.
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

// Chunks of the one tile.
struct TopkRegions {
  Tiles tiles() const { return {1, 1}; }
  Chunk operator()(std::int64_t, int owner) const { return {owner, owner, owner, 1}; }
};

template <class Base>
class TopkComm {
 public:
  static constexpr bool kCoded = true;

  // Counts; the caller then begins the operation on `comm` with list() for a tensor.
  // `operation` is the call's, with its algorithm chosen; `limit` the largest_safe().
  TopkComm(Base& comm, TopkWorkspace& workspace, const Operation& operation, const Call& call,
           float limit);
  // This rank's, and once announced, of all.
  Outlook outlook() const { return outlook_; }
  // Bytes for the lists of rank r.
  std::int64_t area_bytes(int r) const { return area_.bytes(r); }
  // A list that a rank has written for an owner or, a result, for all: where, and its bytes.
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
  bool direct() const { return false; }
  // A place is a region, of a tensor (no data) or of a rank's lists.
  Place input() const { return {nullptr, rank()}; }
  Place output() const { return {nullptr, rank()}; }
  Place input(int) const { return input(); }
  Place output(int) const { return output(); }
  Place slot(int r, std::int64_t) const { return {areas_[static_cast<std::size_t>(r)], r}; }
  Place at(Place place, std::int64_t region) const { return {place.data, place.rank, region}; }

  void announce();
  void signal(int slot) { comm_.signal(slot); }
  void wait_all(int slot, std::int64_t step) { comm_.wait_all(slot, step); }

  void copy(Place to, Place from, std::int64_t) {
    if (to.data != nullptr) {
      stage(static_cast<int>(to.coded));
    } else {
      gather(static_cast<int>(to.coded), from);
    }
  }
  template <class To, class From>
  void reduce(int, To, int, From from, std::int64_t, bool) {
    reduce_lists(from);
    gather(rank(), {areas_[static_cast<std::size_t>(rank())], rank(), rank()});
  }
  // Makes this owner's result, which is not in the output yet.
  template <class From>
  void reduce_lists(From from) {
    for (int r = 0; r < size(); ++r) readers_.push_back(reader(from(r), false));
    reduce_region();
    readers_.clear();
  }

  // Whether a value was not finite; once the algorithm has run, the same on every rank.
  bool nonfinite() const { return nonfinite_ || outlook_.overflow != 0; }

 private:
  TopkRegion region(int owner) const { return area_.region(owner); }
  TopkReader reader(Place place, bool result);
  // Reads what rank r has written, which may be anything.
  template <class Read>
  auto reading(int r, Read read) {
    try {
      return read();
    } catch (const std::invalid_argument& error) {
      comm_.blame(r, error.what());
    }
  }
  bool feeds() const {
    return feedback_.residual != nullptr && outlook_.overflow == 0 && outlook_.unused == 0;
  }
  void stage(int owner);
  void reduce_region();
  void add_chunk(std::int64_t chunk);
  void write_result();
  void gather(int owner, Place from);
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
  Outlook outlook_;
  bool nonfinite_ = false;
  std::vector<std::byte*> areas_;  // every rank's
  std::vector<TopkReader> readers_;
};

}  // namespace pycomm::cpu
