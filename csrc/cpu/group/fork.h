// What a fork does to this library: objects of the parent are refused in the child, and the child
// has neither the parent's connections nor shared tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

namespace pycomm::cpu {

// The number of forks between the first process and this one. An object compares it with the number
// at the time of its creation.
unsigned current_forks();

// Closes these sockets in children that are forked from now on. Otherwise others would take a child
// that outlives this process for the process itself: the other side notices the end of a connection
// only when its last descriptor is closed. A descriptor that is another file by then is left alone.
void close_in_children(std::span<const int> sockets);

// A fork does not copy shared memory. So a child replaces the tensors that this process has in
// windows by private ones, and its writes stay its own.
//
// After copy_at_fork(), the child has the tensors' values at the time of the fork, as it has for
// ordinary memory. Otherwise a page gets the content that it has when the child first writes to it;
// until then, the child sees the writes of its parent and of other ranks.

// Adds pages of a file that are mapped at `data`.
void make_private_in_children(std::byte* data, std::int64_t bytes, int fd, std::int64_t position);
// Removes pages, perhaps a part of what was added: children inherit them as they are. No fork comes
// between that and `replace`, which may map something else there; if it throws, the pages stay.
void leave_as_is_in_children(
    std::byte* data, std::int64_t bytes, const std::function<void()>& replace = [] {});

// Copies all that was added, for the child of this thread's next fork. Children of several forks
// share the copy as long as the values are the same and nobody drops it. Returns false if memory
// does not suffice.
bool copy_at_fork();
// True if `available` bytes of memory suffice to copy `left` more bytes, although other ranks of the
// node may copy theirs at the same time. Each asks again before each portion.
inline constexpr std::int64_t kCopiedPortion = 16 << 20;
bool suffices_for_copy(std::int64_t left, std::int64_t available);
// Frees the copy. Costs next to nothing if there is none.
void drop_copy_for_children();

}  // namespace pycomm::cpu
