"""The agent's web server, and who may use it."""
