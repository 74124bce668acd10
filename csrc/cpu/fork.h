// Tells a forked child from the process that made an object.
#pragma once

namespace pycomm::cpu {

// Forks between the first process and this one; an object compares it with that of its making.
unsigned current_forks();

}  // namespace pycomm::cpu
