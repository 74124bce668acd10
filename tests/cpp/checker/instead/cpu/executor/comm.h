// Replaces csrc/cpu/executor/comm.h, so that the CPU's code between nodes,
// cpu/internode/{group,stages,aggregate}.*, runs on the checker's executor.
#pragma once

#include "checker/comm.h"
#include "cpu/executor/loops.h"
#include "cpu/executor/store_policy.h"

namespace pycomm::cpu {

using checker::Comm;

}  // namespace pycomm::cpu
