"""The first cause, from the rows of the store alone."""
