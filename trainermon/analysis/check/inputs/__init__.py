"""What calls are given that are run on a device: what was recorded, or random numbers like it."""
