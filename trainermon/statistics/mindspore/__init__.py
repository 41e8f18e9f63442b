"""The moments of MindSpore's tensors."""
