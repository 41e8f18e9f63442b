"""What a training runs on and with: how it is collected, and what of it may be written down."""
