"""What holds in every correct training, up to rounding: see README.md."""
