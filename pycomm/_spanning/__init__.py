"""Operations of a group that spans nodes, over process groups of torch.distributed."""
