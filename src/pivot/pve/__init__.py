"""Proxmox VE: a container as wanted and as it is, and what the API answers."""
