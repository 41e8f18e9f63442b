"""The compiled library, for whatever needs no tensor of any framework."""
