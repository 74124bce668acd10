// How a collective fails on the CPU.
#pragma once

#include <stdexcept>
#include <string>

#include "core/signal.h"

namespace pycomm::cpu {

// Becomes pycomm.PeerDied, Timeout, Mismatch or Aborted in Python.
class CollectiveError : public std::runtime_error {
 public:
  CollectiveError(Reason reason, int rank, int pid, std::string operation, std::uint32_t sequence,
                  const std::string& message)
      : std::runtime_error(message),
        reason(reason),
        rank(rank),
        pid(pid),
        operation(std::move(operation)),
        sequence(sequence) {}

  const Reason reason;
  const int rank;  // the one to blame
  const int pid;
  const std::string operation;
  const std::uint32_t sequence;
};

}  // namespace pycomm::cpu
