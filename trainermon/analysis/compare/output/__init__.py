"""What a comparison writes."""
