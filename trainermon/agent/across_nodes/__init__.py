"""What an agent keeps of its ranks for a controller that compares nodes."""
