"""Inputs of recorded calls where a dump has only statistics of them."""
