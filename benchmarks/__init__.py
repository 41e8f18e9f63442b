"""What the README's figures come from. Every figure is a ratio from one run, with count, median and range."""
