"""Cards of a node: as many as there should be, whole, and nobody else's. Facts are those of node_facts.py."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pivot.findings import Finding, Severity
from pivot.machines.pci import Device, short

CARD = re.compile(r"/dev/nvidia(\d+)$")
BUSY = 50  # percent: a link goes to its full speed under load only
QUIET = ("", "None", "N/A", "[N/A]")


def wanted_minors(paths: Sequence[str]) -> set[int]:
    """Numbers of the cards among a container's devices."""
    return {int(match[1]) for path in paths if (match := CARD.match(path))}


def chosen(facts: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """The node's cards that the container gets, by address; all where the driver does not say which number is which."""
    numbers = {short(address): number for address, number in facts["minors"].items()}
    wanted = wanted_minors(paths)
    return {
        address: card
        for address, card in facts["cards"].items()
        if wanted and (address not in numbers or numbers[address] in wanted)
    }


def count_findings(facts: Mapping[str, Any], devices: Mapping[str, Device], host: str) -> Iterator[Finding]:
    """The kernel's PCI tree, lspci and the driver have to see the same cards."""
    seen = set(facts["cards"])
    for address in sorted(address for address in seen if address in devices and devices[address].lost):
        text = "answers nothing any more (rev ff): the card fell off the bus"
        fix = "end what uses it, power the node fully off and on; look at the power supply, cooling and PCIe errors"
        yield Finding("HOST-GPU-LOST", Severity.ERROR, f"{host}, {address}", text, fix)
    smi = facts["smi"]
    if smi["status"] != 0:
        text = f"nvidia-smi fails on the node (status {smi['status']}): {smi['complaint'] or 'without a word'}"
        yield Finding("HOST-GPU-SMI", Severity.ERROR, host, text, "run it there; dmesg | grep NVRM says why")
        return
    known = {short(gpu["address"]) for gpu in smi["gpus"]}
    if missing := sorted(seen - known):
        text = f"the node has {len(seen)} cards, the driver sees {len(known)}; missing: {', '.join(missing)}"
        fix = "dmesg | grep NVRM says why; a card that was lost comes back when the node was powered fully off"
        yield Finding("HOST-GPU-COUNT", Severity.ERROR, host, text, fix)


def state_findings(facts: Mapping[str, Any], cards: Mapping[str, object], host: str) -> Iterator[Finding]:
    """Each card that the container gets, as nvidia-smi describes it."""
    for gpu in facts["smi"]["gpus"]:
        address = short(gpu["address"])
        if address not in cards:
            continue
        subject = f"{host}, {address}"
        if gpu["recovery"] not in QUIET:
            text = f"the driver asks for {gpu['recovery']!r} before this card is used again"
            fix = "end what uses it and do that; if it stays, power the node fully off and on"
            yield Finding("HOST-GPU-RECOVERY", Severity.ERROR, subject, text, fix)
        memory, window = _mib(gpu["memory"]), _mib(gpu["bar1"])
        if memory and window and window < memory:
            text = f"BAR1 is {window} MiB, the card has {memory} MiB: other cards cannot reach all of its memory"
            fix = "BIOS: above-4G decoding and resizable BAR on; a card in display mode: displaymodeselector, headless"
            yield Finding("HOST-GPU-BAR1", Severity.WARNING, subject, text, fix, "local-inference-lab/rtx6kpro")
        yield from _speed(gpu, subject)


def _speed(gpu: Mapping[str, str], subject: str) -> Iterator[Finding]:
    now, most, own = (_mib(gpu[name]) for name in ("gen", "gen_max", "gen_card"))
    if most and own and most < own:
        text = f"the slot gives PCIe generation {most} to a card of generation {own}"
        yield Finding("HOST-GPU-SLOT", Severity.INFO, subject, text, "look for another slot, riser or BIOS setting")
    busy = _mib(gpu["utilization"])
    if busy >= BUSY and 0 < now < most:
        text = f"the link runs at PCIe generation {now} of {most} while the card is {busy} % busy"
        fix = "look for PCIe errors (dmesg | grep AER); pcie_aspm=off pcie_port_pm=off helped others"
        yield Finding("HOST-GPU-LINK", Severity.WARNING, subject, text, fix, "local-inference-lab/rtx6kpro")


def _mib(text: str) -> int:
    """The number that a value begins with, 0 for none: ``97887 MiB``."""
    match = re.match(r"\d+", text)
    return int(match[0]) if match else 0


def process_findings(
    facts: Mapping[str, Any], cards: Mapping[str, object], vmid: int | None, shared: bool, host: str
) -> Iterator[Finding]:
    """Computations of others on the container's cards. vmid: None where the container is not known, then nothing is
    said; shared: whether others may use them."""
    if vmid is None:
        return
    for gpu in facts["smi"]["gpus"]:
        if short(gpu["address"]) not in cards:
            continue
        for process in gpu["processes"]:
            owner = re.search(r"/lxc/(\d+)(?:/|$)", process["cgroup"])
            if "C" not in process["type"] or (owner and int(owner[1]) == vmid):
                continue
            whose = f"of container {owner[1]}" if owner else "of the node itself"
            name = process["process_name"].rpartition("/")[2]
            text = f"process {process['pid']} ({name}) {whose} computes on it and holds {process['used_memory']}"
            fix = "end it there; or give the card to both and say so (proxmox_container_gpu_shared)"
            severity = Severity.INFO if shared else Severity.ERROR
            yield Finding("HOST-GPU-PROCESS", severity, f"{host}, {short(gpu['address'])}", text, fix)


def inside_findings(smi: Mapping[str, Any], paths: Sequence[str], host: str) -> list[Finding]:
    """The container's own nvidia-smi has to see every card that it was given. smi: status, complaint, cards (lines)."""
    wanted = len(wanted_minors(paths))
    if smi["status"] != 0:
        text = f"nvidia-smi fails in the container (status {smi['status']}): {smi['complaint'] or 'without a word'}"
        return [Finding("HOST-GPU-SMI", Severity.ERROR, host, text, "compare with nvidia-smi on the node")]
    if len(smi["cards"]) < wanted:
        text = f"the container was given {wanted} cards, its driver sees {len(smi['cards'])}"
        fix = "look at the node first: nvidia-smi -L there; then restart the container"
        return [Finding("HOST-GPU-COUNT", Severity.ERROR, host, text, fix)]
    return []
