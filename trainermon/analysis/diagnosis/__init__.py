"""The first cause of what went wrong in a run."""
