"""The registry of pins: every version a deployment depends on, with its checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pivot.findings import Finding, Severity

ENGINE_KEYS = ("version", "accelerator", "python", "lock", "sha256")
MODEL_KEYS = ("repository", "revision", "source", "manifest")
CONTRACT_KEYS = ("target", "layers", "convention", "source")
CONVENTIONS = ("input", "output")
# what fills a null, by key
FILLS: dict[str, Callable[[str, Mapping[str, Any]], str]] = {
    "driver": lambda *_: "ssh root@NODE cat /proc/driver/nvidia/version",
    "convention": lambda *_: "read how its training code counts layers, then write convention: input or output",
    "sha256": lambda _, pin: f"sha256sum {pin.get('lock')}",
    "revision": lambda _, pin: f"python -m pivot.weights {pin.get('source')} --repository {pin.get('repository')}",
    "manifest": lambda _, pin: f"python -m pivot.weights {pin.get('source')} --repository {pin.get('repository')}",
}


def check(pins: Mapping[str, Any], root: Path, inventory: Path) -> list[Finding]:
    """Everything wrong with the registry.

    pins: the variable pivot_pins; root: directory that `lock` is relative to; inventory: the one that `manifest` is
    relative to. Reads locks and manifests, nothing else.
    """
    findings: list[Finding] = []
    if "driver" in pins:  # a registry of hosts without GPUs has none
        findings += _empty("pivot_pins", pins, ("driver",))
    for name, pin in sorted((pins.get("engines") or {}).items()):
        findings += _engine(f"pivot_pins.engines.{name}", pin, root)
    for name, pin in sorted((pins.get("models") or {}).items()):
        findings += _model(f"pivot_pins.models.{name}", pin, inventory)
    return findings


def _finding(code: str, subject: str, message: str, fix: str) -> Finding:
    return Finding(code, Severity.ERROR, subject, message, fix)


def _empty(subject: str, pin: Mapping[str, Any], keys: tuple[str, ...]) -> Iterator[Finding]:
    for key in keys:
        if pin.get(key) is None:
            fill = FILLS[key](subject, pin) if key in FILLS else f"write {key}: into the registry"
            yield _finding("PIN-NULL", subject, f"{key} is not known yet", fill)


def _engine(subject: str, pin: Mapping[str, Any], root: Path) -> Iterator[Finding]:
    yield from _empty(subject, pin, ENGINE_KEYS)
    if pin.get("lock") is None or pin.get("sha256") is None:
        return
    lock = root / pin["lock"]
    if not lock.is_file():
        yield _finding("PIN-LOCK", subject, f"the lock {pin['lock']} does not exist", "make lock, or correct the path")
    elif (actual := hashlib.sha256(lock.read_bytes()).hexdigest()) != pin["sha256"]:
        message = f"the lock {pin['lock']} is not the pinned one"
        yield _finding("PIN-LOCK", subject, message, f"review the change, then write sha256: {actual}")


def _model(subject: str, pin: Mapping[str, Any], inventory: Path) -> Iterator[Finding]:
    yield from _empty(subject, pin, MODEL_KEYS)
    if pin.get("manifest") is not None:
        yield from _manifest(subject, pin, inventory / pin["manifest"])
    contract = pin.get("contract")
    if contract is None:
        return
    yield from _empty(f"{subject}.contract", contract, CONTRACT_KEYS)
    if contract.get("convention") not in (None, *CONVENTIONS):
        message = f"convention {contract['convention']!r} is none of {', '.join(CONVENTIONS)}"
        yield _finding("PIN-CONVENTION", f"{subject}.contract", message, "say whether layers name inputs or outputs")


def _manifest(subject: str, pin: Mapping[str, Any], path: Path) -> Iterator[Finding]:
    command = FILLS["manifest"](subject, pin)
    try:
        manifest = json.loads(path.read_text())
    except OSError:
        yield _finding("PIN-MANIFEST", subject, f"the manifest {pin['manifest']} cannot be read", command)
        return
    except ValueError:
        yield _finding("PIN-MANIFEST", subject, f"the manifest {pin['manifest']} is no JSON", command)
        return
    for key in ("repository", "revision"):
        if pin.get(key) is not None and manifest.get(key) != pin[key]:
            message = f"{key} is {pin[key]!r} here and {manifest.get(key)!r} in {pin['manifest']}"
            yield _finding("PIN-MANIFEST", subject, message, f"make them agree, or write the manifest anew: {command}")
