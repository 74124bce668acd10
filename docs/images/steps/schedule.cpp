// Prints what each rank does in an all-reduce: `schedule ring 4`. The text of the algorithms
// (core/algorithms/) runs on an executor that moves nothing and writes down every step, a line each:
//
//   move <rank> <elements> <rank>:<area>:<offset>... < <rank>:<area>:<offset>...   to, from
//   signal <rank> <channel>
//   wait <rank> <peer> <channel> <step>
//   meet <rank>            all ranks have announced the operation
//
// The tensor has a line of elements per rank, and there is one tile of one piece per chunk.
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "core/algorithms/one_shot.h"
#include "core/algorithms/ring.h"
#include "core/algorithms/tree.h"
#include "core/algorithms/two_shot.h"

namespace pycomm {

enum Area : std::int64_t { kInput = 1, kOutput, kSlots };

class RecordingComm {
 public:
  static constexpr bool kCoded = false;

  RecordingComm(int rank, int size, bool zero_copy)
      : rank_(rank), size_(size), zero_copy_(zero_copy) {}

  int rank() const { return rank_; }
  int size() const { return size_; }
  int root() const { return 0; }
  std::int64_t count() const { return size_; }
  std::int64_t block() const { return 1; }
  std::int64_t elements(std::int64_t bytes) const { return bytes; }
  std::int64_t line() const { return 1; }
  std::int64_t slot_count() const { return 2 * size_; }
  bool zero_copy() const { return zero_copy_; }

  Location input() const { return input(rank_); }
  Location output() const { return output(rank_); }
  Location input(int r) const { return place(r, kInput); }
  Location output(int r) const { return place(r, kOutput); }
  Location slot(int r, std::int64_t n) const { return place(r, kSlots + n); }
  Location at(Location location, std::int64_t n) const {
    return {location.data + n, location.rank};
  }

  void announce() { std::printf("meet %d\n", rank_); }
  void signal(int channel) { std::printf("signal %d %d\n", rank_, channel); }
  void wait(int peer, int channel, std::int64_t step) {
    std::printf("wait %d %d %d %ld\n", rank_, peer, channel, static_cast<long>(step));
  }
  void wait_all(int channel, std::int64_t step) {
    for (int r = 0; r < size_; ++r) {
      if (r != rank_) wait(r, channel, step);
    }
  }

  void copy(Location to, Location from, std::int64_t n) {
    const auto both = [&](Location location) { return [=](int) { return location; }; };
    reduce(1, both(to), 1, both(from), n, true);
  }
  template <class To, class From>
  void reduce(int n_to, To to, int n_from, From from, std::int64_t n, bool) {
    if (n <= 0) return;
    std::printf("move %d %ld", rank_, static_cast<long>(n));
    for (int i = 0; i < n_to; ++i) print(to(i));
    std::printf(" <");
    for (int i = 0; i < n_from; ++i) print(from(i));
    std::printf("\n");
  }

 private:
  // Nothing is read or written there: an address is an area and an offset.
  static constexpr std::int64_t kAreaSize = 1 << 16;
  static Location place(int r, std::int64_t area) {
    return {reinterpret_cast<std::byte*>(area * kAreaSize), r};
  }
  static void print(Location location) {
    const auto address = reinterpret_cast<std::int64_t>(location.data);
    std::printf(" %d:%ld:%ld", location.rank, static_cast<long>(address / kAreaSize),
                static_cast<long>(address % kAreaSize));
  }

  const int rank_, size_;
  const bool zero_copy_;
};

static_assert(PlainExecutor<RecordingComm>);

}  // namespace pycomm

int main(int argc, char** argv) {
  using namespace pycomm;
  if (argc != 3) return 2;
  const std::string_view name = argv[1];
  const int size = std::atoi(argv[2]);
  for (int rank = 0; rank < size; ++rank) {
    RecordingComm comm(rank, size, name != "one_shot");
    if (name == "one_shot") one_shot(comm);
    if (name == "two_shot") two_shot(comm);
    if (name == "ring") ring(comm);
    if (name == "tree") tree(comm);
  }
}
