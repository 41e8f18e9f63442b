"""Full tensors of a step: capture, the file contract, readers and writers."""
