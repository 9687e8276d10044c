"""Thin adapter: decisions of `pivot.pve.proxmox` as filters."""

from collections.abc import Callable
from typing import Any

from pivot.pve import proxmox, proxmox_raw


def raw_problems(answer: dict[str, Any], subject: str) -> list[dict[str, str]]:
    """What the node said about a container's file, as findings."""
    return [finding.as_dict() for finding in proxmox_raw.answered(subject, answer)]


class FilterModule:
    """Filters about containers."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Names as the roles use them."""
        return {
            "pivot_proxmox_devices": proxmox.device_keys,
            "pivot_proxmox_interfaces": proxmox.interface_keys,
            "pivot_proxmox_mounts": proxmox.mount_keys,
            "pivot_proxmox_raw_problems": raw_problems,
        }
