"""Files in the formats of msprobe."""
