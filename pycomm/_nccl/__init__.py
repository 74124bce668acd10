"""Operations on CUDA tensors of a group that spans nodes, over NCCL."""
