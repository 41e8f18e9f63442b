"""Watches trainings of MindSpore. Nothing here, and nothing that it imports, loads torch."""
