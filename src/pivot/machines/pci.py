"""The PCI tree of a node (``lspci -D -nn -vv``) and what lies between its cards: links, ACS and the IOMMU."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pivot.findings import Finding, Severity

UNDECIDED = "undecided"  # what the IOMMU should be, while nobody has measured
_HEAD = re.compile(r"(?P<address>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) (?P<text>.*)")
_BUSES = re.compile(r"Bus: primary=\w+, secondary=(\w+), subordinate=(\w+)")
_WIDTH = re.compile(r"\bWidth x(\d+)")
ACS_SOURCE = "NVIDIA/nccl issue 1999; local-inference-lab/rtx6kpro, hardware/asus-esc8000a-e13p-broadcom-switches.md"


@dataclasses.dataclass(slots=True)
class Device:
    """One device. buses: those behind it, where it is a bridge; width: lanes of its link now, 0 where it has none;
    driver: the kernel's, empty where none has it."""

    address: str
    text: str
    buses: range = range(0)
    width: int = 0
    redirects: bool = False
    driver: str = ""

    @property
    def lost(self) -> bool:
        """Whether it answers nothing but ones any more."""
        return "(rev ff)" in self.text


def short(address: str) -> str:
    """An address as the kernel writes it: ``00000000:61:00.0`` of nvidia-smi is ``0000:61:00.0``."""
    domain, _, rest = address.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def parse_lspci(lines: Iterable[str]) -> dict[str, Device]:
    """Devices by address."""
    found: dict[str, Device] = {}
    device: Device | None = None
    for line in lines:
        if head := _HEAD.match(line):
            device = found[head["address"]] = Device(head["address"], head["text"])
        elif device is None:
            continue
        elif buses := _BUSES.search(line):
            device.buses = range(int(buses[1], 16), int(buses[2], 16) + 1)
        elif "LnkSta:" in line and (width := _WIDTH.search(line)):
            device.width = int(width[1])
        elif "Kernel driver in use:" in line:
            device.driver = line.partition(":")[2].strip()
        elif "ACSCtl:" in line:
            device.redirects = "ReqRedir+" in line or "CmpltRedir+" in line
    return found


def not_lent[Card](cards: Mapping[str, Card], devices: Mapping[str, Device]) -> dict[str, Card]:
    """Cards without those that virtual machines have (vfio): the node's own driver neither sees nor uses them."""
    lent = {address for address, device in devices.items() if device.driver.startswith("vfio")}
    return {address: card for address, card in cards.items() if address not in lent}


def above(address: str, devices: Mapping[str, Device]) -> list[Device]:
    """The bridges between a device and the root, the root port first."""
    domain, bus, _ = short(address).split(":")
    same = (device for device in devices.values() if device.address.startswith(domain + ":"))
    return sorted((device for device in same if int(bus, 16) in device.buses), key=lambda device: -len(device.buses))


def acs_findings(addresses: Sequence[str], devices: Mapping[str, Device], host: str) -> list[Finding]:
    """Bridges above several cards that send what one card writes to another up to the root."""
    if len(addresses) < 2:
        return []
    if not devices:
        text = "lspci prints nothing, so nobody knows whether bridges redirect what cards send each other (ACS)"
        return [Finding("HOST-PCI-UNSEEN", Severity.WARNING, host, text, "apt-get install pciutils on the node")]
    bridges = {bridge.address: bridge for address in addresses for bridge in above(address, devices)}
    wrong = sorted(address for address, bridge in bridges.items() if bridge.redirects)
    if not wrong:
        return []
    text = (
        f"ACS redirects what cards write to each other up to the root, at {_few(wrong)}: they are slow, or hang"
        " after NCCL's Init COMPLETE with all cards at 100 %"
    )
    fix = (
        f"setpci -s {wrong[0]} ECAP_ACS+6.w=0000 for each until the next boot, ACS off in the BIOS for good; else"
        " sglang_server_nccl_profile: p2p-fallback"
    )
    return [Finding("HOST-PCI-ACS", Severity.WARNING, host, text, fix, ACS_SOURCE)]


def iommu(cards: Mapping[str, Mapping[str, Any]]) -> str:
    """How cards' addresses are translated: off (no groups), pt (identity), on (translated), mixed; "" for no cards."""
    kinds = {str(card.get("iommu_group/type", "")) for card in cards.values()}
    states = {"off" if not kind else "pt" if kind == "identity" else "on" for kind in kinds}
    return states.pop() if len(states) == 1 else "mixed" if states else ""


def iommu_findings(cards: Mapping[str, Mapping[str, Any]], wanted: str, cmdline: str, host: str) -> list[Finding]:
    """The IOMMU against what the inventory says, off, pt or on; while it is undecided, whether several cards have to go
    through it. Reports disagree about off and pt, so neither is preferred."""
    state = iommu(cards)
    given = " ".join(word for word in cmdline.split() if "iommu" in word) or "nothing about it"
    if wanted != UNDECIDED and state and state != wanted:
        text = f"the IOMMU is {state}, proxmox_host_iommu says {wanted}; the kernel was started with {given}"
        fix = f"start the kernel {_CMDLINE[wanted]} and reboot the node, or correct proxmox_host_iommu"
        return [Finding("HOST-PCI-IOMMU", Severity.WARNING, host, text, fix)]
    if wanted == UNDECIDED and state in ("on", "mixed") and len(cards) > 1:
        text = (
            f"the IOMMU translates the cards' addresses (started with {given}): what cards write to each other goes"
            " through the root, where it is slow or hangs on some boards"
        )
        fix = (
            "measure, then say as proxmox_host_iommu what is right: off (amd_iommu=off iommu=off), pt (iommu=pt with"
            " NCCL_CUMEM_ENABLE=1) or on; sources disagree"
        )
        reference = "gardenlinux issue 4556; local-inference-lab/rtx6kpro issue 25"
        return [Finding("HOST-PCI-IOMMU", Severity.WARNING, host, text, fix, reference)]
    return []


_CMDLINE = {"off": "with amd_iommu=off iommu=off", "pt": "with iommu=pt", "on": "without iommu=off and iommu=pt"}


def width_findings(
    cards: Mapping[str, Mapping[str, Any]], devices: Mapping[str, Device], host: str
) -> Iterator[Finding]:
    """Links with fewer lanes than a card has, its own or one between it and the root; idle cards keep their width."""
    narrow: dict[str, tuple[int, int, list[str]]] = {}
    for address, card in cards.items():
        most, now = (_number(card.get(name)) for name in ("max_link_width", "current_link_width"))
        if 0 < now < most:
            narrow[address] = (now, most, [address])
        for bridge in above(address, devices):
            if 0 < bridge.width < most:
                narrow.setdefault(bridge.address, (bridge.width, most, []))[2].append(address)
    for place, (now, most, behind) in sorted(narrow.items()):
        text = f"the link at {place} has {now} lanes, and {_few(behind)} could use {most}"
        fix = "seat the card and its cable anew; else look for lane width or bifurcation of that port in the BIOS"
        yield Finding("HOST-GPU-LINK", Severity.WARNING, f"{host}, {place}", text, fix, ACS_SOURCE.partition("; ")[2])


def _number(value: object) -> int:
    text = str(value or "")
    return int(text) if text.isdigit() else 0


def _few(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
