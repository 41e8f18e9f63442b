"""What a person looks at: the built-in web page."""
