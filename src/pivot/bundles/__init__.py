"""Bundles: what is collected, masked and brought to the controller."""
