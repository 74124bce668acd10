#!/bin/bash
# Runs train.py on 4 nodes, and restarts all ranks after a failure: sbatch slurm.sh
# Each node has 8 ranks: with a GPU each, as here, or on CPUs if you delete --gpus-per-node.
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
ranks=${SLURM_GPUS_ON_NODE:-8} # of a node
export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK          # srun does not take it from sbatch
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / ranks)) # torchrun's own choice is 1

srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "$ranks" --max-restarts 3 \
  --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head:29500" train.py
