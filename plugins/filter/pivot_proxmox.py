"""Thin adapter: decisions of `pivot.proxmox` as filters."""

from collections.abc import Callable
from typing import Any

from pivot import proxmox


class FilterModule:
    """Filters about containers."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Names as the roles use them."""
        return {
            "pivot_proxmox_devices": proxmox.device_keys,
            "pivot_proxmox_interfaces": proxmox.interface_keys,
            "pivot_proxmox_mounts": proxmox.mount_keys,
        }
