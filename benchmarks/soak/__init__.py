"""A long run under every exporter, with servers that come and go: what it needs, and what has arrived in the end."""
