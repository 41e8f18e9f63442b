"""How an agent starts, stays the only one, and ends."""
