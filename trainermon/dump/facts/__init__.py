"""What a reader needs to make a recorded call again, and cannot tell from its tensors: see README.md."""
