// Looks at a window without taking part: from a process that is not one of its ranks, or for the
// report of a rank whose operation has failed. It never writes, and waits for nobody.
#pragma once

#include <vector>

#include "core/record.h"
#include "cpu/memory/heap.h"
#include "cpu/memory/window.h"

namespace pycomm::cpu {

// The parts of a rank's slice that tell what it does.
struct Slice {
  const Control& control;
  const Record* records;
  const Record* launches;
  const Subject* subjects;
};

// The text of a rank's subject; empty if it has gone or there is none.
std::string subject_of(const Control& control, const Subject* subjects, std::uint32_t number);

// What a rank shows of its memory.
MemoryFigures memory_of(const Control& control);

// The state in a rank's slice: at most `most` operations, and as many launches on its device, with
// the operations that the device was in last. `waits_for` is the rank of this window that it waits
// for. `rank` and `pid` are those of identity_word().
RankState state_of(const Slice& slice, int ranks, std::size_t most, const TickScale& scale);

class WindowReader {
 public:
  // Maps the window that begins at a position of a file, read-only. The caller may close `fd`
  // afterwards. Throws std::invalid_argument if no window begins there, and std::runtime_error if
  // it is one of another version.
  WindowReader(int fd, std::int64_t position);

  // The state of the group; see state_of().
  GroupState state(std::size_t most) const;

 private:
  const Header header_;
  const Mapping slices_;
};

}  // namespace pycomm::cpu
