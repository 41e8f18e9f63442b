"""Looking at dumped tensors: what is in one, how two differ, the extremes, a histogram, other formats."""
