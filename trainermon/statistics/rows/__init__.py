"""What is asked of rows of moments in the host's memory at every step."""
