"""The graph as one HTML file that needs nothing else."""
