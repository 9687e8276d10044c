"""Logs, and what they mean."""
