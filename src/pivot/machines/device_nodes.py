"""Device nodes that a container wants: there, nodes and not files, with the driver's numbers, also after a boot."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pivot.findings import Finding, Severity

NVIDIA_MAJOR = 195  # fixed for these names; nvidia-uvm and nvidia-caps get theirs when the module is loaded
FIXED_MINORS = {"nvidiactl": 255, "nvidia-modeset": 254}
UVM_MINORS = {"nvidia-uvm": 0, "nvidia-uvm-tools": 1}
DYNAMIC = {"nvidia-uvm": "nvidia-uvm", "nvidia-uvm-tools": "nvidia-uvm", "nvidia-caps": "nvidia-caps"}
UNMAPPED = 65534


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One path as `stat` saw it; kind is stat's own word, e.g. "character special file"; owner -1: not asked."""

    path: str
    kind: str
    major: int
    minor: int
    mode: int
    owner: int = -1


def parse_stat(lines: Iterable[str]) -> dict[str, Node]:
    """Lines of ``stat -c '%n|%F|%t:%T|%a|%u'`` by path; the owner may be missing. %t and %T are hexadecimal.

    A ValueError names the line that is none.
    """
    nodes = {}
    for line in lines:
        if not line.strip():
            continue
        fields = line.strip().split("|")
        try:
            path, kind, numbers, mode, *owner = fields
            major, minor = (int(number, 16) for number in numbers.split(":"))
            nodes[path] = Node(path, kind, major, minor, int(mode, 8), int(owner[0]) if owner else -1)
        except ValueError:
            raise ValueError(f"not a line of stat -c '%n|%F|%t:%T|%a|%u': {line!r}") from None
    return nodes


def parse_majors(text: str) -> dict[str, int]:
    """Character device drivers and their numbers, from the text of ``/proc/devices``."""
    lines = text.partition("Block devices:")[0].splitlines()
    pairs = (line.split() for line in lines if line[:4].strip().isdigit())
    return {name: int(number) for number, name in pairs}


def device_paths(devices: Iterable[str]) -> list[str]:
    """Paths of a container's devices: ``/dev/nvidia0,mode=0666`` or ``path=/dev/nvidia0`` or the path alone."""
    paths = []
    for device in devices:
        parts = [part.removeprefix("path=") for part in device.split(",")]
        paths.append(next((part for part in parts if part.startswith("/")), device))
    return paths


def device_findings(
    wanted: Sequence[str], nodes: Mapping[str, Node], majors: Mapping[str, int], host: str, container: bool
) -> list[Finding]:
    """Device nodes that a container wants: there, a node and not a file, with the driver's numbers.

    nodes: of `parse_stat`; majors: of `parse_majors`; container: judged inside (else on the node).
    """
    found = []
    for path in device_paths(wanted):
        node = nodes.get(path)
        subject = f"{host}, {path}"
        if node is None:
            found.append(_missing(subject, container))
        elif node.kind.startswith("regular"):
            found.append(_regular(subject, path, container))
        elif node.kind != "character special file":
            text = f"is a {node.kind}, where a character device is needed"
            found.append(Finding("HOST-DEVICE-KIND", Severity.ERROR, subject, text, "correct the list of devices"))
        else:
            found += _numbers(node, majors, subject)
            if container and node.owner == UNMAPPED:
                text = (
                    "belongs to nobody (65534): the node's own file was mounted, not a device made for this container"
                )
                fix = "give it as dev[n] (proxmox_container_devices), not as a mount"
                found.append(Finding("HOST-DEVICE-OWNER", Severity.WARNING, subject, text, fix))
    return found


def _missing(subject: str, container: bool) -> Finding:
    if container:
        text, fix = "is not in the container", "add it to proxmox_container_devices and restart the container"
    else:
        text = "does not exist on the node, so the container could not start; some nodes appear only after first use"
        fix = "run `nvidia-smi` and `nvidia-modprobe -u -m -c 0` on the node, at every boot before the guests start"
    return Finding("HOST-DEVICE-MISSING", Severity.ERROR, subject, text, fix)


def _regular(subject: str, path: str, container: bool) -> Finding:
    text = "is a regular file where a device should be"
    if container:
        text += ": its source was missing on the node when the container started"
        fix = f"on the node: remove {path} if it is a file there, make the device, then restart the container"
    else:
        fix = f"remove it (`rm {path}`), make the device with `nvidia-modprobe -u -m -c 0`, restart the container"
    return Finding("HOST-DEVICE-FILE", Severity.ERROR, subject, text, fix)


def _numbers(node: Node, majors: Mapping[str, int], subject: str) -> list[Finding]:
    """Wrong numbers: opening the node would reach another driver, or none."""
    name = node.path.removeprefix("/dev/")
    card = re.fullmatch(r"nvidia(\d+)", name)
    if card or name in FIXED_MINORS:
        major, minor = NVIDIA_MAJOR, int(card.group(1)) if card else FIXED_MINORS[name]
    else:
        driver = DYNAMIC.get(name.split("/")[0], "")
        if driver not in majors:
            return _not_loaded(node, driver, majors, subject)
        major, minor = majors[driver], UVM_MINORS.get(name, node.minor)
    if (node.major, node.minor) == (major, minor):
        return []
    text = f"has number {node.major}:{node.minor} (hexadecimal {node.major:x}:{node.minor:x}), not {major}:{minor}"
    fix = "numbers change with the driver: make the node anew on the node, then restart the container"
    return [Finding("HOST-DEVICE-NUMBER", Severity.ERROR, subject, text, fix)]


def _not_loaded(node: Node, driver: str, majors: Mapping[str, int], subject: str) -> list[Finding]:
    """A node whose driver has no number, on a machine whose cards have theirs; nothing is known of others."""
    if not driver or not any(name.startswith("nvidia") for name in majors):
        return []
    text = f"has number {node.major}:{node.minor}, which leads nowhere: {driver} is not loaded on the node"
    fix = "run `nvidia-modprobe -u -m -c 0` on the node, then restart the container"
    return [Finding("HOST-DEVICE-NUMBER", Severity.ERROR, subject, text, fix)]


def boot_findings(facts: Mapping[str, Any], wanted: Sequence[str], host: str) -> list[Finding]:
    """Whether something makes the NVIDIA nodes before the guests start at the next boot. facts: of node_facts.py."""
    paths = [path for path in device_paths(wanted) if path.startswith("/dev/nvidia")]
    if not paths or facts["udev"]:
        return []
    makers = [unit for unit in facts["before_guests"] if "nvidia-modprobe" in unit.get("ExecStart", "")]
    if any(unit.get("UnitFileState") in ("enabled", "enabled-runtime", "static") for unit in makers):
        return []
    named = f" ({makers[0].get('Id')} would, but is not enabled)" if makers else ""
    text = (
        f"nothing makes {paths[-1]} before the containers start at the next boot{named}: a container that starts at"
        " boot would stay stopped, since the driver's own nodes appear at their first use"
    )
    fix = "proxmox_host_boot_nodes: present writes a unit before pve-guests.service"
    return [Finding("HOST-BOOT-NODES", Severity.WARNING, host, text, fix, "games-on-whales/wolf issue 361")]
