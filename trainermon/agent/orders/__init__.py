"""Orders to ranks, and the dumps that come of them."""
