"""What one device gave beside what another did."""
