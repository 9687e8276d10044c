"""The devices that an inventory gives a container, before any node is asked: their form, and whether CUDA has all."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pivot.findings import Finding, Severity
from pivot.pve.proxmox import SHARED_TAG, gpus
from pivot.pve.proxmox_raw import parsed as parsed_lines

ERROR, WARNING = Severity.ERROR, Severity.WARNING
VARIABLE = "proxmox_container_devices"
# fields of dev[n] in Proxmox VE
FIELDS = ("path", "deny-write", "gid", "mode", "uid")
CARD = re.compile(r"/dev/nvidia(\d+)")
# what CUDA opens besides the cards, with what happens without it; only tools need the last
TOOLS = "/dev/nvidia-uvm-tools"
BESIDES = {
    "/dev/nvidiactl": "CUDA opens it first",
    "/dev/nvidia-uvm": "without unified memory CUDA ends with error 999, while nvidia-smi still works",
    TOOLS: "profilers and debuggers need it",
}
# names of the flag that says over how many cards a server spreads one copy of the weights
TP = ("tp-size", "tensor-parallel-size", "tp")
# what multiplies cards, or machines
MORE = ("pp-size", "pipeline-parallel-size", "pp", "dp-size", "data-parallel-size", "nnodes", "base-gpu-id")
# what is compared among the hosts of an inventory, besides the devices
VARIABLES = (
    *(VARIABLE, "proxmox_container_lxc", "proxmox_container_node", "proxmox_container_node_host"),
    *("proxmox_container_gpu_shared", "proxmox_container_tags"),
)
Wrong = tuple[str, Severity, str, str]
"""A finding's code, severity, message and fix."""


def deployed(subject: str, values: Mapping[str, Any]) -> list[Finding]:
    """What is wrong with the devices of a host's variables; a list of another type is found where types are."""
    given = values.get(VARIABLE)
    flags = values.get("sglang_server_launch")
    if not isinstance(given, list) or not all(isinstance(item, str) for item in given):
        return []
    wrong = [*_forms(given)]
    paths = [path for path, _ in map(parsed, given)]
    if values.get("gpu_runtime_accelerator") == "cuda":
        wrong += _cuda(paths, flags if isinstance(flags, Mapping) else {})
    if given and values.get("proxmox_container_api_token_id") and values.get("proxmox_container_root_via") == "ticket":
        message = f"{VARIABLE} are passed through, which Proxmox refuses to every API token, root's too"
        fix = "log in as root@pam with its password, or write proxmox_container_root_via: pct"
        wrong.append(("DEVICE-TOKEN", ERROR, message, fix))
    return [Finding(code, severity, subject, message, fix) for code, severity, message, fix in wrong]


def parsed(device: str) -> tuple[str, dict[str, str]]:
    """``/dev/nvidia0,mode=0666`` as its path (empty without one) and its other fields; a word without = is a field."""
    first, *rest = [part.strip() for part in device.split(",")]
    if "=" not in first:
        first = f"path={first}"
    pairs = [part.partition("=") for part in (first, *rest)]
    fields = {name: value for name, _, value in pairs}
    return fields.pop("path", ""), fields


def _forms(devices: Iterable[str]) -> Iterator[Wrong]:
    """Each as Proxmox takes it, and each once."""
    seen: set[str] = set()
    for device in devices:
        where = f"{VARIABLE}, {device[:80]!r}"
        path, fields = parsed(device)
        if not re.fullmatch(r"/dev/[^\s,]+", path):
            yield "DEVICE-PATH", ERROR, f"{where}: no path below /dev", "write for example /dev/nvidia0,mode=0666"
        elif path in seen:
            yield "DEVICE-TWICE", ERROR, f"{VARIABLE} name {path} more than once", "name each device once"
        seen.add(path)
        for name, value in fields.items():
            if name not in FIELDS:
                close = difflib.get_close_matches(name, FIELDS, n=1)
                fix = f"did you mean {close[0]}?" if close else f"Proxmox has {', '.join(FIELDS)}"
                yield "DEVICE-FIELD", ERROR, f"{where}: {name[:40]} is no field of a device", fix
            elif name == "mode" and not re.fullmatch(r"0[0-7]{3}", value):
                message = f"{where}: the mode {value[:10]!r} is not four octal digits, the first 0"
                digits = value.removeprefix("0o").lstrip("0")
                fix = (
                    f"write mode={digits:0>4}" if re.fullmatch(r"[0-7]{1,3}", digits) else "write for example mode=0666"
                )
                yield "DEVICE-MODE", ERROR, message, fix
            elif name in ("uid", "gid") and not re.fullmatch(r"[0-9]{1,10}", value):
                yield "DEVICE-FIELD", ERROR, f"{where}: {name} is {value[:40]!r}, no number", f"write {name}=0"


def _cuda(paths: list[str], flags: Mapping[str, Any]) -> Iterator[Wrong]:
    """What CUDA needs of them, and as many cards as the server spreads over."""
    cards = {int(match[1]) for path in paths if (match := CARD.fullmatch(path))}
    if not cards:
        return  # no card is passed by its NVIDIA name; what does reach the container is seen there
    for path, why in BESIDES.items():
        if path not in paths:
            message = f"{VARIABLE} name {len(cards)} cards but not {path}: {why}"
            yield "DEVICE-BESIDES", WARNING if path == TOOLS else ERROR, message, f"add {path},mode=0666"
    size = next((flags[name] for name in TP if name in flags), 1)
    asked = int(size) if isinstance(size, int | str) and re.fullmatch(r"[0-9]{1,6}", str(size)) else None
    if asked is None or any(name in flags for name in MORE):
        return  # another count, or one that is wrong where flags are looked at
    if asked > len(cards):
        lacking = sorted(set(range(asked)) - cards)
        message = f"the server spreads over {asked} cards (tp-size), but {VARIABLE} name {len(cards)}"
        fix = "add " + ", ".join(f"/dev/nvidia{number}" for number in lacking[:8]) if lacking else "lower tp-size"
        yield "DEVICE-COUNT", ERROR, message, f"{fix}, or lower tp-size" if lacking else fix


def given_twice(hosts: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Cards that two containers of one node are to have, unless both say that they share. hosts: variables by host."""
    owners: dict[tuple[str, str], list[str]] = {}
    for host, values in sorted(hosts.items()):
        node = values.get("proxmox_container_node_host") or values.get("proxmox_container_node")
        for card in sorted(cards(values)) if node else ():
            owners.setdefault((str(node), card), []).append(host)
    pairs: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (node, card), names in owners.items():
        if len(names) > 1 and not all(_shares(hosts[name]) for name in names):
            pairs.setdefault((node, tuple(names)), []).append(card)
    return [_twice(node, names, found) for (node, names), found in sorted(pairs.items())]


def _twice(node: str, names: Sequence[str], found: Sequence[str]) -> Finding:
    each = "both" if len(names) == 2 else "all"
    return Finding(
        "DEVICE-TAKEN",
        ERROR,
        ", ".join(names),
        f"{' and '.join(names)} are to have {', '.join(found)} of node {node}",
        f"give each cards of its own in {VARIABLE}, or write proxmox_container_gpu_shared: true for {each}",
    )


def cards(values: Mapping[str, Any]) -> set[str]:
    """Paths of the cards that a host's variables give it, as devices and by raw mount entries."""
    devices, raw = values.get(VARIABLE), values.get("proxmox_container_lxc")
    config: dict[str, Any] = {}
    if isinstance(devices, list):
        config = {f"dev{number}": item for number, item in enumerate(devices) if isinstance(item, str)}
    if isinstance(raw, list):
        config["lxc"] = parsed_lines(item for item in raw if isinstance(item, Mapping))
    return gpus(config)


def _shares(values: Mapping[str, Any]) -> bool:
    tags = values.get("proxmox_container_tags")
    tagged = isinstance(tags, list) and SHARED_TAG in tags
    return tagged or str(values.get("proxmox_container_gpu_shared")).lower() in ("true", "yes", "on", "1")
