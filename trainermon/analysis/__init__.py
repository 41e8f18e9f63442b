"""Offline tools: what a run and its dumps say about the first cause."""
