"""Documentation, and the programs that generate parts of it from the code."""
