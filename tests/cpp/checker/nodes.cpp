// The CPU's code between nodes, as it is, on what stands in for the rest of cpu/ (checker/instead).
#include "cpu/hosts.cpp"
#include "cpu/parts.cpp"
#include "cpu/pool.cpp"
