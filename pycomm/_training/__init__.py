"""How gradients are exchanged during training, by the hooks and by the wrapper."""
