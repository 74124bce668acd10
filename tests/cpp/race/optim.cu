// The optimizers' kernels that are searched for races.
#include "cuda/optim/adamw.cu"
#include "cuda/optim/amsgrad.cu"
#include "cuda/optim/grad_norm.cu"
#include "cuda/optim/lamb.cu"
#include "cuda/optim/lamb_ratios.cu"
#include "cuda/optim/lion.cu"
#include "cuda/optim/sgd.cu"
#include "cuda/optim/step.cu"
