"""Labelled pairs of dumps, on which `trainermon compare` is judged."""
