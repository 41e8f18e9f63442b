"""Finds who is to blame for what differs."""
