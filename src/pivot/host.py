"""What a node offers and a container gets: device nodes, driver, kernel module, shared memory, limits.

Facts come from `roles/proxmox_host/files/node_facts.py` and `roles/gpu_runtime/files/runtime_facts.py`. What needs real
GPUs (driver and module) is judged from recorded texts and has not been seen on hardware.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pivot.findings import Finding, Severity

NVIDIA_MAJOR = 195  # fixed for these names; nvidia-uvm and nvidia-caps get theirs when the module is loaded
FIXED_MINORS = {"nvidiactl": 255, "nvidia-modeset": 254}
DYNAMIC = {"nvidia-uvm": "nvidia-uvm", "nvidia-uvm-tools": "nvidia-uvm", "nvidia-caps": "nvidia-caps"}
UNMAPPED = 65534
MIB = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One path as `stat` saw it; kind is stat's own word, e.g. "character special file"; owner -1: not asked."""

    path: str
    kind: str
    major: int
    minor: int
    mode: int
    owner: int = -1


@dataclasses.dataclass(frozen=True, slots=True)
class Listener:
    """A listening TCP socket and the user whose it is."""

    address: str
    port: int
    uid: int


def parse_listeners(text: str) -> list[Listener]:
    """Lines of ``ss -H -l -t -n -e``; ss leaves out the uid of root."""
    found = []
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 5:
            continue
        address, _, port = fields[3].rpartition(":")
        uid = re.search(r"\buid:(\d+)", line)
        plain = address.strip("[]").partition("%")[0]
        found.append(Listener(plain, int(port), int(uid.group(1)) if uid else 0))
    return found


def parse_properties(text: str) -> dict[str, str]:
    """Names and values of ``systemctl show``."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {name: value for name, equals, value in pairs if equals}


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
            return []
        major, minor = majors[driver], node.minor
    if (node.major, node.minor) == (major, minor):
        return []
    text = f"has number {node.major}:{node.minor} (hexadecimal {node.major:x}:{node.minor:x}), not {major}:{minor}"
    fix = "numbers change with the driver: make the node anew on the node, then restart the container"
    return [Finding("HOST-DEVICE-NUMBER", Severity.ERROR, subject, text, fix)]


def driver_version(text: str) -> str:
    """The version in ``/proc/driver/nvidia/version``, a library's name or a package version; "" if there is none."""
    match = re.search(r"(?<!\d)(?<!\d\.)(\d{3}\.\d{2,3}(?:\.\d{2})?)(?!\.?\d)", text)
    return match.group(1) if match else ""


def driver_findings(module: str, libraries: Sequence[str], host: str, pinned: str = "") -> list[Finding]:
    """The container's driver libraries must equal the node's loaded module, to the last number.

    module: text of ``/proc/driver/nvidia/version``; libraries: names such as ``libcuda.so.580.95.05``; pinned: the
    version that both should have, if one is.
    """
    loaded = driver_version(module)
    if not loaded:
        text = "no NVIDIA kernel module is loaded on the node" + (f": {module.strip()!r}" if module.strip() else "")
        fix = "install the open kernel modules on the node and load them"
        return [Finding("HOST-DRIVER-MODULE", Severity.ERROR, host, text, fix)]
    versions = sorted({version for version in map(driver_version, libraries) if version})
    if not versions:
        text = f"the container has no driver libraries; the node's module is {loaded}"
        fix = f"install the libraries of exactly {loaded} in the container, without the kernel module"
        return [Finding("HOST-DRIVER-LIBRARIES", Severity.ERROR, host, text, fix)]
    found = []
    for version in versions:
        if version == loaded:
            continue
        text = f"the container's driver libraries are {version}, the node's kernel module is {loaded}: " + (
            _moved(version, loaded, pinned)
        )
        fix = f"bring both to {pinned or loaded} and hold the packages; never install an unpinned driver to mend this"
        found.append(Finding("HOST-DRIVER-MISMATCH", Severity.ERROR, host, text, fix))
    if pinned and not found and loaded != pinned:
        text = f"node and container agree on driver {loaded}, the pin says {pinned}"
        found.append(Finding("HOST-DRIVER-PIN", Severity.WARNING, host, text, "change the driver, or the pin"))
    return found


def _moved(version: str, loaded: str, pinned: str) -> str:
    """Which side left the common version."""
    if pinned == loaded:
        return "the container moved"
    if pinned == version:
        return "the node moved, or still runs the module from before its update (reboot)"
    newer_inside = [int(part) for part in version.split(".")] > [int(part) for part in loaded.split(".")]
    return "the container is ahead (updated alone?)" if newer_inside else "the node is ahead (updated alone?)"


def module_findings(license_text: str, gpus: Sequence[str], host: str) -> list[Finding]:
    """Blackwell works with the open kernel modules only. gpus: lines of lspci; license_text: of ``modinfo nvidia``."""
    blackwell = [line for line in gpus if re.search(r"\bGB[12]\d\d", line)]
    if not blackwell or not license_text or "GPL" in license_text:
        return []
    text = f"the nvidia module is the proprietary one (license: {license_text.strip()}), but {blackwell[0].strip()!r}"
    text += " is a Blackwell card, which needs the open modules"
    fix = "install the open flavour of the same version (nvidia-open, or the .run file with -m=kernel-open), reboot"
    return [Finding("HOST-MODULE-FLAVOUR", Severity.ERROR, host, text, fix)]


def idmap_findings(subids: Mapping[str, Sequence[str]], host: str) -> list[Finding]:
    """Root needs 65536 ids to give to unprivileged containers. subids: file name → its lines."""
    found = []
    for name, lines in subids.items():
        ranges = [line.strip().split(":") for line in lines if line.startswith(("root:", "0:"))]
        if not any(len(parts) == 3 and parts[2].isdigit() and int(parts[2]) >= 65536 for parts in ranges):
            text = f"/etc/{name} gives root no range of 65536 ids, which unprivileged containers need"
            found.append(Finding("HOST-IDMAP", Severity.ERROR, host, text, f"add `root:100000:65536` to /etc/{name}"))
    return found


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


def node(facts: Mapping[str, Any], devices: Sequence[str], host: str) -> list[Finding]:
    """Everything about a Proxmox node for one container's devices. facts: of node_facts.py."""
    found = device_findings(devices, parse_stat(facts["stat"]), parse_majors(facts["drivers"]), host, container=False)
    found += module_findings(facts["license"], facts["gpus"], host)
    if facts["pve"]:
        found += idmap_findings(facts["subids"], host)
    return found


def runtime(facts: Mapping[str, Any], options: Mapping[str, Any], host: str) -> list[Finding]:
    """Everything about the inside of a container. facts: of runtime_facts.py; options: devices, accelerator,
    shm_min_mib, driver (pinned version or "")."""
    cuda = options["accelerator"] == "cuda"
    found = device_findings(
        options["devices"], parse_stat(facts["stat"]), parse_majors(facts["drivers"]), host, container=True
    )
    found += memory_findings(facts, host, int(options["shm_min_mib"]), memlock_unlimited=cuda)
    if cuda:
        found += driver_findings(facts["module"], facts["libraries"], host, str(options["driver"]))
    return found
