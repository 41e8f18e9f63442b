"""Hooks into model, gradients and optimizer: what they see is handed on, what they touch is restored."""
