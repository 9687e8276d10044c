"""Numbers of an inventory that have the right type and cannot be meant: ports, ids, sizes, times."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pivot.findings import Finding, Severity
from pivot.inventory.inventory import Options, where_set

PORT = (1, 65535)
PORTS = ("sglang_server_port", "sglang_server_nccl_port")
CAPABILITY = "gpu_runtime_compute_capability"
# least and most by variable, None for no end; those of a container are what Proxmox takes
LIMITS: dict[str, tuple[int, int | None]] = {
    "proxmox_container_api_port": PORT,
    "proxmox_container_vmid": (100, 999_999_999),
    "proxmox_container_memory": (16, None),
    "proxmox_container_cores": (1, 8192),
    "proxmox_container_rootfs_gib": (1, None),
    "sglang_server_port": PORT,
    "sglang_server_nccl_port": PORT,
    "sglang_server_start_limit": (1, None),
    "model_weights_hub_workers": (1, None),
}
# the same of all whose names end so; a wait of no time would fail each run
SECONDS = (1, None)


def check(subject: str, values: Mapping[str, Any], options: Options, inventory: Path) -> Iterator[Finding]:
    """Numbers of one role's variables out of what they can be; other types are found where types are looked at."""
    for name, option in options.items():
        number = _number(values.get(name))
        if option.get("type") not in ("int", "float") or number is None:
            continue
        least, most = LIMITS.get(name, SECONDS if name.endswith("_seconds") else (0, None))
        if number < least or (most is not None and number > most):
            right = f"from {least} to {most}" if most is not None else f"of {least} or more"
            message = f"{name} is {values[name]} (set in {where_set(name, inventory)}), which cannot be"
            yield Finding("VAR-RANGE", Severity.ERROR, subject, message, f"write a number {right}")
    capability = values.get(CAPABILITY)
    if CAPABILITY in options and capability and not re.fullmatch(r"[0-9]{1,2}\.[0-9]", str(capability)[:9]):
        message = (
            f"{CAPABILITY} is {capability!s:.40} (set in {where_set(CAPABILITY, inventory)}), no compute capability"
        )
        yield Finding("VAR-RANGE", Severity.ERROR, subject, message, 'write it as NVIDIA does, for example "12.0"')
    ports = [values.get(name, options[name].get("default")) for name in PORTS if name in options]
    if len(ports) == len(PORTS) and len({str(port) for port in ports}) == 1 and ports[0] is not None:
        places = " and ".join(where_set(name, inventory) for name in PORTS if name in values)
        message = f"{' and '.join(PORTS)} are both {ports[0]} (set in {places}), and two sockets cannot share a port"
        yield Finding("VAR-RANGE", Severity.ERROR, subject, message, "write another port for one of them")


def _number(value: object) -> float | None:
    """A number, also as a text; None when it is none."""
    if isinstance(value, bool) or not re.fullmatch(r"[+-]?[0-9]{1,15}(\.[0-9]{1,15})?", str(value)[:40]):
        return None
    return float(str(value))
