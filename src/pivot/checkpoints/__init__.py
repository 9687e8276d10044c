"""Weights: manifests, sources, what a host holds of them."""
