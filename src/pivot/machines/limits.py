"""Memory that a container may use: /dev/shm, locked memory, and the control group against the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pivot.findings import Finding, Severity

MIB, GIB = 1 << 20, 1 << 30


def memory_findings(facts: Mapping[str, Any], host: str, shm_min_mib: int, memlock_unlimited: bool) -> list[Finding]:
    """Shared memory and the limit of locked memory. facts: ``shm`` (bytes, free, mode, left_behind), ``memlock``."""
    found = []
    shm = facts["shm"]
    subject = f"{host}, /dev/shm"
    left = [str(name) for name in shm["left_behind"]]
    leftovers = f"; nobody uses {', '.join(left[:5])}{' …' if len(left) > 5 else ''}" if left else ""
    if shm["bytes"] < shm_min_mib * MIB:
        text = f"has {shm['bytes'] // MIB} MiB, {shm_min_mib} are wanted: NCCL's segments would not fit{leftovers}"
        fix = f"make it larger (/etc/fstab: tmpfs /dev/shm tmpfs size={shm_min_mib}M 0 0); NCCL's flags are no cure"
        found.append(Finding("HOST-SHM-SMALL", Severity.ERROR, subject, text, fix))
    if shm["bytes"] and shm["free"] < shm["bytes"] // 20:
        text = f"is full: {shm['free'] // 1024} of {shm['bytes'] // 1024} KiB are free{leftovers}"
        fix = f"rm {' '.join(left)}" if left else "look at what fills it: ls -l /dev/shm"
        found.append(Finding("HOST-SHM-FULL", Severity.ERROR, subject, text, fix))
    elif left:
        text = f"holds segments of runs that died: {', '.join(left[:5])}"
        found.append(Finding("HOST-SHM-LEFTOVERS", Severity.INFO, subject, text, f"rm {' '.join(left)}"))
    if shm["mode"] != "1777":
        text = f"has mode {shm['mode']}: services that are not root cannot make segments there"
        found.append(Finding("HOST-SHM-MODE", Severity.ERROR, subject, text, "chmod 1777 /dev/shm"))
    hard = facts["memlock"]
    if memlock_unlimited and hard != -1:
        text = f"the limit of locked memory is {hard // 1024} KiB, and an unprivileged container cannot raise it"
        fix = "on the node: lxc.prlimit.memlock = unlimited in the container's configuration, then restart it"
        found.append(Finding("HOST-MEMLOCK", Severity.WARNING, host, text, fix))
    return found


def throttled_from(limit: int) -> int:
    """Bytes from which Proxmox VE slows a container down, by its memory limit (pve-container, LXC/Config.pm)."""
    return limit - 128 * MIB if limit >= 16 * GIB else limit * 1016 // 1024


def weight_findings(memory: Mapping[str, int], weights_gib: float, host: str) -> list[Finding]:
    """The page cache of the weights counts against the container. memory: total (bytes, as /proc/meminfo has it in the
    container), max and high (of its control group, -1 where there is no limit)."""
    limits = [throttled_from(memory["total"]), *(value for value in (memory["high"], memory["max"]) if value >= 0)]
    room = min(limits) / GIB
    if not weights_gib or room >= weights_gib:
        return []
    text = (
        f"the weights have {weights_gib:g} GiB, and from {room:.0f} GiB on the container is slowed down, for what it"
        " reads counts against its memory"
    )
    fix = "proxmox_container_memory: more than the weights; else do not prefetch them, and expect a slow load"
    return [Finding("HOST-MEMORY-HIGH", Severity.WARNING, host, text, fix, "pve-container; TensorRT-LLM PR 17430")]
