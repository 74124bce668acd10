// Replaces csrc/cpu/comm.h, so that the CPU's code between nodes,
// cpu/internode/{group,stages,aggregate}.*, runs on the checker's executor.
#pragma once

#include "checker/comm.h"
#include "cpu/loops.h"
#include "cpu/store_policy.h"

namespace pycomm::cpu {

using checker::Comm;

}  // namespace pycomm::cpu
