// The CPU's unchanged code between nodes, on replacements for the rest of cpu/ (checker/instead).
#include "cpu/internode/aggregate.cpp"
#include "cpu/internode/group.cpp"
#include "cpu/internode/stages.cpp"
