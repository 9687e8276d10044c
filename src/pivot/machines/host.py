"""A Proxmox node and a container's inside as a whole: every check of their facts, each of which has its own module.

Facts come from `roles/proxmox_host/files/node_facts.py` and `roles/gpu_runtime/files/runtime_facts.py`. What needs real
cards is judged from recorded and composed texts (tests/data/hardware) and has not been seen on hardware.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pivot.findings import Finding, Severity
from pivot.machines import cards, container_lines, device_nodes, drivers, limits, pci, xids
from pivot.machines.device_nodes import device_paths, parse_majors, parse_stat

OLDEST, NEWEST = (8, 2), 9  # of Proxmox VE: dev[n] is in the interface since 8.2; what was recorded is 9.2.11


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
        plain = address.strip("[]").partition("%")[0].replace("*", "::")
        found.append(Listener(plain, int(port), int(uid.group(1)) if uid else 0))
    return found


def addresses_of(host: str) -> set[str]:
    """The addresses that a name means, or the one that is written, as ss writes them. OSError: no such name."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return {str(ipaddress.ip_address(str(place[0]).partition("%")[0])) for *_, place in found}


def parse_properties(text: str) -> dict[str, str]:
    """Names and values of ``systemctl show``."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {name: value for name, equals, value in pairs if equals}


def idmap_findings(subids: Mapping[str, Sequence[str]], host: str) -> list[Finding]:
    """Root needs 65536 ids to give to unprivileged containers. subids: file name → its lines."""
    found = []
    for name, lines in subids.items():
        ranges = [line.strip().split(":") for line in lines if line.startswith(("root:", "0:"))]
        if not any(len(parts) == 3 and parts[2].isdigit() and int(parts[2]) >= 65536 for parts in ranges):
            text = f"/etc/{name} gives root no range of 65536 ids, which unprivileged containers need"
            found.append(Finding("HOST-IDMAP", Severity.ERROR, host, text, f"add `root:100000:65536` to /etc/{name}"))
    return found


def version_findings(pve: str, host: str) -> list[Finding]:
    """The node's Proxmox VE has to be one that this project knows. pve: what ``pveversion`` prints."""
    match = re.search(r"pve-manager/(\d+)\.(\d+)", pve)
    if not match or OLDEST <= (int(match[1]), int(match[2])) < (NEWEST + 1, 0):
        return []
    version, old = f"{match[1]}.{match[2]}", int(match[1]) <= NEWEST
    text = f"the node runs Proxmox VE {version}; known are 8.2 to 9.x (recorded: 9.2.11)"
    severity = Severity.ERROR if old else Severity.WARNING
    fix = "upgrade it: devices of containers need 8.2" if old else "expect differences, and run with --check first"
    return [Finding("HOST-PVE-VERSION", severity, host, text, fix)]


def node(facts: Mapping[str, Any], options: Mapping[str, Any], host: str) -> list[Finding]:
    """Everything about a node for one container. facts: of node_facts.py; options: devices, vmid (or None), iommu
    (off, pt, on or undecided) and shared (whether others may use the cards).

    What is no Proxmox VE (the lab's node) is asked for devices and the module's flavour alone.
    """
    devices = options["devices"]
    found = device_nodes.device_findings(
        devices, parse_stat(facts["stat"]), parse_majors(facts["drivers"]), host, container=False
    )
    heads = [line for line in facts["lspci"] if "10de:" in line]
    found += drivers.module_findings(facts["license"], facts["module"], heads, host)
    if facts["pve"]:
        vmid = options["vmid"]
        found += version_findings(facts["pve"], host)
        found += idmap_findings(facts["subids"], host)
        found += container_lines.container_findings(facts, vmid, host)
        if cards.wanted_minors(device_paths(devices)):
            found += _hardware(facts, options, host)
    return found


def _hardware(facts: Mapping[str, Any], options: Mapping[str, Any], host: str) -> Iterator[Finding]:
    """The cards, the driver and what lies between them, on a node whose container gets cards."""
    paths = device_paths(options["devices"])
    devices = pci.parse_lspci(facts["lspci"])
    others = set(facts["cards"])
    facts = {**facts, "cards": pci.not_lent(facts["cards"], devices)}
    ours = cards.chosen(facts, paths)
    yield from drivers.driver_findings(facts["module"], facts["libraries"], host, place="node")
    yield from drivers.kernel_findings(facts, host)
    yield from drivers.update_findings(facts["packages"], host)
    yield from drivers.reboot_findings(facts, host)
    yield from drivers.hmm_findings(facts, len(ours), host)
    yield from device_nodes.boot_findings(facts, paths, host)
    yield from cards.count_findings(facts, devices, host)
    yield from cards.state_findings(facts, ours, host)
    yield from cards.process_findings(facts, ours, options["vmid"], bool(options["shared"]), host)
    yield from pci.width_findings(ours, devices, host)
    yield from pci.acs_findings(sorted(ours), devices, host)
    yield from pci.iommu_findings(ours, str(options["iommu"]), facts["cmdline"], host)
    reports = xids.reports(facts["kernel_log"], facts["boot"])
    yield from xids.xid_findings(reports, others - set(ours), host)


def runtime(facts: Mapping[str, Any], options: Mapping[str, Any], host: str) -> list[Finding]:
    """Everything about the inside of a container. facts: of runtime_facts.py; options: devices, accelerator,
    programs (that have to be there), shm_min_mib, driver (pinned version or ""), weights_gib (0: not known), pending
    (whether the driver is about to be installed: then nothing is said of it)."""
    cuda = options["accelerator"] == "cuda"
    devices = options["devices"]
    found = device_nodes.device_findings(
        devices, parse_stat(facts["stat"]), parse_majors(facts["drivers"]), host, container=True
    )
    found += limits.memory_findings(facts, host, int(options["shm_min_mib"]), memlock_unlimited=cuda)
    found += program_findings(options["programs"], facts["programs"], host)
    if cuda:
        found += limits.weight_findings(facts["memory"], float(options["weights_gib"]), host)
    if cuda and not options["pending"]:
        driver = drivers.driver_findings(facts["module"], facts["libraries"], host, str(options["driver"]))
        found += driver
        found += drivers.update_findings(facts["packages"], host)
        found += drivers.compat_findings(facts["loader"], host)
        if not driver or driver[0].code == "HOST-DRIVER-PIN":
            found += cards.inside_findings(facts["smi"], device_paths(devices), host)
    return found


# of programs that are not called as their package; the toolkit is NVIDIA's, for the torch of the CUDA lock
PACKAGES = {"nft": "nftables", "c++": "g++", "nvcc": "cuda-toolkit-13-0"}


def program_findings(wanted: Sequence[str], there: Sequence[str], host: str) -> list[Finding]:
    """Programs that later steps call and that are not in the container."""
    missing = [name for name in wanted if name not in there]
    if not missing:
        return []
    are, them = ("is", "it") if len(missing) == 1 else ("are", "them")
    message = f"{' and '.join(missing)} {are} not in the container: later steps call {them}"
    packages = " ".join(PACKAGES.get(name, name) for name in missing)
    fix = f"in the container: apt-get install {packages}; or leave out of gpu_runtime_programs what is not used"
    return [Finding("HOST-PROGRAM", Severity.ERROR, host, message, fix)]
