"""What the loop of a training script leaves undone: see README.md."""
