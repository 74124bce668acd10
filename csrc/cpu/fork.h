// Lets an object tell a forked child from the process that created the object.
#pragma once

namespace pycomm::cpu {

// The number of forks between the first process and this one. An object compares it with the number
// at the time of its creation.
unsigned current_forks();

}  // namespace pycomm::cpu
