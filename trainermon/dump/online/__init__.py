"""Checks and repairs single operations while training runs: `task: free_benchmark`, `AccuracyDispatch`."""
