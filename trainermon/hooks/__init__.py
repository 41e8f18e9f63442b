"""How code is put into torch without changing the training."""
