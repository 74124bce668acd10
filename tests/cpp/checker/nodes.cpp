// The CPU's code between nodes, as it is, on what stands in for the rest of cpu/ (checker/instead).
#include "cpu/internode/aggregate.cpp"
#include "cpu/internode/group.cpp"
#include "cpu/internode/stages.cpp"
