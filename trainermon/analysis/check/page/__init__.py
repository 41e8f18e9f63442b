"""One HTML page, and Markdown, for the verdicts of a check."""
