"""What is said of two dumps that were compared."""
