"""Nodes and containers: devices, cards, drivers, limits."""
