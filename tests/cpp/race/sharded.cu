// The kernels of sharded steps that are searched for races.
#include "cuda/optim/sharded.cu"
#include "cuda/optim/sharded_adamw.cu"
#include "cuda/optim/sharded_lamb.cu"
#include "cuda/optim/sharded_lion.cu"
#include "cuda/optim/sharded_sgd.cu"
