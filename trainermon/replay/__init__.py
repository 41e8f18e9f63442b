"""Re-runs a step, or single calls, to find the first operation at fault."""
