// The error that a failed collective throws, and how messages describe operations.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/details.h"
#include "core/operation.h"
#include "core/record.h"
#include "core/signal.h"

namespace pycomm {

// Becomes pycomm.PeerDied, Timeout, Mismatch, Aborted or ProtocolError in Python.
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

  // The same error, with the information that operations up to `completed` have succeeded on every
  // rank.
  CollectiveError knowing(std::uint32_t completed) const {
    const std::string known =
        completed == 0 ? "none" : "operations up to " + std::to_string(completed);
    CollectiveError error = saying("; known to be complete on every rank: " + known);
    error.completed = completed;
    return error;
  }
  // The same error, with what this rank's operation was about; `subject` may be empty.
  CollectiveError about(const std::string& subject) const {
    return subject.empty() ? *this : saying("; this rank exchanged " + subject);
  }
  // The same error, with its cause.
  CollectiveError because(const std::string& cause) const { return saying(": " + cause); }

  const Reason reason;
  const int rank;  // the rank to blame
  const int pid;
  const std::string operation;
  const std::uint32_t sequence;
  std::uint32_t completed = 0;
  std::shared_ptr<const GroupState> group;  // when it failed; may be null

 private:
  CollectiveError saying(const std::string& more) const {
    return {reason, rank, pid, operation, sequence, std::string(what()) + more};
  }
};

// `details` belongs to the operation; null if unknown.
inline std::string describe(const Operation& operation, const Details* details = nullptr) {
  std::string text = std::string(name_of(operation.collective)) + "(";
  if (operation.collective != Collective::barrier) {
    text += std::string(operation.element == Element::same ? name_of(operation.dtype)
                                                           : name_of(operation.element)) +
            ", " + std::to_string(operation.count / units_of(operation)) + " elements";
  }
  if (reduces(operation.collective)) {
    text += std::string(", op=") + name_of(operation.op);
  }
  if (operation.collective == Collective::all_reduce) {
    text += std::string(", algorithm=") + name_of(operation.algorithm);
  }
  if (operation.codec.kind != CodecKind::none) text += ", " + describe(operation.codec);
  if (operation.offset != 0) text += ", offset=" + std::to_string(first_element(operation));
  if (operation.tag != 0) text += ", tag=" + std::to_string(operation.tag);
  if (operation.collective == Collective::broadcast || operation.collective == Collective::scatter)
    text += ", src=" + std::to_string(operation.root);
  if (operation.collective == Collective::reduce || operation.collective == Collective::gather)
    text += ", dst=" + std::to_string(operation.root);
  if (operation.device == Device::cuda) text += ", on CUDA";
  std::string told = details != nullptr ? describe(*details) : std::string();
  if (told.empty() && operation.details != 0) {
    told = ", details " + std::to_string(operation.details);
  }
  if (!told.empty()) {
    text += told.substr(text.back() == '(' ? 2 : 0);  // a barrier has nothing before it, so no ", "
  }
  return text + ")";
}

inline std::string describe_rank(int rank, int pid) {
  return "rank " + std::to_string(rank) + " (pid " + std::to_string(pid) + ")";
}

// An operation failed; `what` tells why.
inline CollectiveError ended(Reason reason, int rank, int pid, const std::string& what,
                             const Operation& operation, std::uint32_t sequence) {
  return {reason,
          rank,
          pid,
          name_of(operation.collective),
          sequence,
          what + " during " + describe(operation) + ", operation " + std::to_string(sequence) +
              " of the group"};
}

// What a rank did that made an operation fail.
inline std::string failure_text(Reason reason, int rank, int pid) {
  const char* what =
      reason == Reason::peer_died   ? " died or left"
      : reason == Reason::timeout   ? " did not answer within the timeout"
      : reason == Reason::mismatch  ? " called another operation"
      : reason == Reason::malformed ? " sent something that is not a message of this group"
      : reason == Reason::returned  ? " has returned from its function and takes no further part"
                                    : " aborted the group";
  return describe_rank(rank, pid) + what;
}

// An operation failed because of a rank.
inline CollectiveError failure(Reason reason, int rank, int pid, const Operation& operation,
                               std::uint32_t sequence) {
  return ended(reason, rank, pid, failure_text(reason, rank, pid), operation, sequence);
}

// A rank waited too long for another one. The other may be the rank that gets this error, if it was
// busy with something else. A rank names itself if it has waited for a message from any rank, or
// from itself.
inline std::string timeout_text(std::uint64_t word, bool told_to_culprit, int pid) {
  const int rank = rank_of(word), waiter = waiter_of(word);
  if (waiter < 0) return failure_text(Reason::timeout, rank, pid);
  const std::string time = std::to_string(seconds_of(word));
  const std::string seconds = time.substr(0, time.find('.') + 2) + " s";
  const std::string waiting = "rank " + std::to_string(waiter) + " waited " + seconds + " for ";
  if (from_any_rank(word)) return waiting + "a message from any rank";
  if (waiter == rank) return waiting + "a message from itself";
  if (told_to_culprit) {
    return waiting + "this rank, " + describe_rank(rank, pid) + ", and gave up before it came";
  }
  return describe_rank(rank, pid) + " did not answer within the timeout: " + waiting + "it";
}

inline CollectiveError timeout(std::uint64_t word, bool told_to_culprit, int pid,
                               const Operation& operation, std::uint32_t sequence) {
  return ended(Reason::timeout, rank_of(word), pid, timeout_text(word, told_to_culprit, pid),
               operation, sequence);
}

// Ranks `first` and `r` called different operations.
inline CollectiveError mismatch(int first, const Operation& called, int r, const Operation& other,
                                int pid, std::uint32_t sequence, const Details* details = nullptr,
                                const Details* other_details = nullptr) {
  return {Reason::mismatch,
          r,
          pid,
          name_of(called.collective),
          sequence,
          "operation " + std::to_string(sequence) + ": rank " + std::to_string(first) + " called " +
              describe(called, details) + ", rank " + std::to_string(r) + " called " +
              describe(other, other_details)};
}

// Rank `to` expects another number of elements than rank `from` sends to it.
inline CollectiveError uneven(int from, std::int64_t sent, int to, std::int64_t expected, int pid,
                              const Operation& called, std::uint32_t sequence) {
  return {Reason::mismatch,
          from,
          pid,
          name_of(called.collective),
          sequence,
          "operation " + std::to_string(sequence) + ", " + name_of(called.collective) + ": rank " +
              std::to_string(from) + " sends " + std::to_string(sent) + " elements to rank " +
              std::to_string(to) + ", which expects " + std::to_string(expected)};
}

inline constexpr const char* kOverwritten =
    "a rank of this node has overwritten the group's shared memory";

// The abort word has a value that no rank writes.
inline CollectiveError overwritten(const Operation& called, std::uint32_t sequence) {
  return {Reason::malformed, -1, -1, name_of(called.collective), sequence, kOverwritten};
}

// Rank `r` sent something invalid.
inline CollectiveError malformed(int r, int pid, const Operation& called, std::uint32_t sequence,
                                 const std::string& what) {
  return failure(Reason::malformed, r, pid, called, sequence).because(what);
}

}  // namespace pycomm
