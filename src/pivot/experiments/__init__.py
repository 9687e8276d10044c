"""Debugging: the toggle, prompts, what-if, training samples."""
