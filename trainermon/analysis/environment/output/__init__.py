"""A comparison of environments as files."""
