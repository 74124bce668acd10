"""The exchange of gradients during training, for the hooks and the wrapper."""
