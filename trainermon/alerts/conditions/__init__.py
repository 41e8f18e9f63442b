"""The conditions that rules may ask for."""
