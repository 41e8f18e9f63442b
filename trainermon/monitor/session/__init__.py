"""What `TrainerMon` attaches to a model of torch. Importing this package loads no torch; `opening` does."""
