"""The embedded default of Pivot: a Proxmox VE stand-in on loopback whose containers are real LXC containers."""
