"""A diagnosis as one HTML file that needs nothing else: what was found, the code, the values, the steps before."""
