"""Calls, devices and models on which `trainermon check` is judged."""
