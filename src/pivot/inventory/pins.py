"""The registry of pins: every version a deployment depends on, with its checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pivot.findings import Finding, Severity
from pivot.machines.driver_files import wrong_file
from pivot.places import directory_at, file_at

ENGINE_KEYS = ("version", "accelerator", "python", "lock", "sha256")
MODEL_KEYS = ("repository", "revision", "source", "manifest")
DRIVER_KEYS = ("version", "file", "sha256")
CONTRACT_KEYS = ("target", "layers", "convention", "source")
CONVENTIONS = ("input", "output")
# what fills a null, by key, where it is not a manifest's
FILLS = {
    "convention": "read how its training code counts layers, then write convention: input or output",
}
DRIVER_FILLS = {
    "version": "ssh root@NODE cat /proc/driver/nvidia/version",
    "file": "download NVIDIA-Linux-x86_64-VERSION.run from NVIDIA, then file: its path; '' where nothing is installed",
    "sha256": "sha256sum NVIDIA-Linux-x86_64-VERSION.run",
}


def check(pins: object, root: Path, inventory: Path) -> list[Finding]:
    """Everything wrong with the registry.

    pins: the variable pivot_pins; root: directory that `lock` and a relative `source` are relative to; inventory: the
    one that `manifest` is relative to. Reads locks and manifests and looks for sources, nothing else.
    """
    if not isinstance(pins, Mapping):
        message = f"the registry of pins is {_shown(pins)}, not a mapping"
        return [_finding("PIN-FORM", "pivot_pins", message, "start from inventory/example/group_vars/all/pins.yml")]
    findings: list[Finding] = []
    if "driver" in pins:  # a registry of hosts without GPUs has none
        findings += _driver(pins["driver"], root)
    for kind in ("engines", "models"):
        entries = pins.get(kind) or {}
        wrong = _misshapen(f"pivot_pins.{kind}", entries)
        findings += wrong
        if wrong:
            continue
        for name, pin in sorted(entries.items()):
            subject = f"pivot_pins.{kind}.{name}"
            unusual = _no_text(subject, pin, ENGINE_KEYS if kind == "engines" else MODEL_KEYS)
            findings += unusual
            if not unusual:
                findings += _engine(subject, pin, root) if kind == "engines" else _model(subject, pin, root, inventory)
    return findings


def _finding(code: str, subject: str, message: str, fix: str) -> Finding:
    return Finding(code, Severity.ERROR, subject, message, fix)


def _shown(value: object) -> str:
    return "not set" if value is None else f"{value!r:.40}"


def _misshapen(subject: str, entries: object) -> list[Finding]:
    """What is no mapping although it has to be one: a group of pins, or one pin of it."""
    wrong = {subject: entries} if not isinstance(entries, Mapping) else {}
    if isinstance(entries, Mapping):
        wrong = {f"{subject}.{name}": pin for name, pin in entries.items() if not isinstance(pin, Mapping)}
    fix = "write it as in inventory/example/group_vars/all/pins.yml"
    return [_finding("PIN-FORM", name, f"this is {_shown(value)}, not a mapping", fix) for name, value in wrong.items()]


def _no_text(subject: str, pin: Mapping[str, Any], keys: tuple[str, ...]) -> list[Finding]:
    """Values that YAML did not read as a text, e.g. the number 3.1 for python: 3.10."""
    wrong = [key for key in keys if not isinstance(pin.get(key), str | None)]
    return [
        _finding(
            "PIN-FORM", subject, f"{key} is {_shown(pin[key])}, not a text", f"put it in quotes, as it is meant ({key})"
        )
        for key in wrong
    ]


def _empty(subject: str, pin: Mapping[str, Any], keys: tuple[str, ...], fills: Mapping[str, str]) -> Iterator[Finding]:
    for key in keys:
        if pin.get(key) is None:
            fill = fills.get(key, f"write {key}: into the registry")
            yield _finding("PIN-NULL", subject, f"{key} is not known yet", fill)


def _driver(pin: object, root: Path) -> Iterator[Finding]:
    """The NVIDIA driver of nodes and containers: its version, and the installer of its libraries."""
    subject = "pivot_pins.driver"
    if not isinstance(pin, Mapping):
        yield _finding("PIN-FORM", subject, f"this is {_shown(pin)}, not a mapping", "write version, file and sha256")
        return
    unusual = _no_text(subject, pin, DRIVER_KEYS)
    yield from unusual
    keys = DRIVER_KEYS[:2] if pin.get("file") == "" else DRIVER_KEYS
    yield from _empty(subject, pin, keys, DRIVER_FILLS)
    if unusual or not all(pin.get(key) for key in DRIVER_KEYS):
        return
    if wrong := wrong_file(root / pin["file"], pin["sha256"], pin["version"]):
        yield _finding("PIN-DRIVER", subject, wrong, "put the pinned file there, or correct the pin")


def _engine(subject: str, pin: Mapping[str, Any], root: Path) -> Iterator[Finding]:
    yield from _empty(subject, pin, ENGINE_KEYS, {"sha256": f"sha256sum {pin.get('lock')}"})
    if pin.get("lock") is None or pin.get("sha256") is None:
        return
    lock = root / pin["lock"]
    if file_at(lock) is None:
        yield _finding("PIN-LOCK", subject, f"the lock {pin['lock']} does not exist", "make lock, or correct the path")
    elif (actual := hashlib.sha256(lock.read_bytes()).hexdigest()) != pin["sha256"]:
        message = f"the lock {pin['lock']} is not the pinned one"
        yield _finding("PIN-LOCK", subject, message, f"review the change, then write sha256: {actual}")
    yield from _patches(subject, pin, root)


def _is_patch(entry: object) -> bool:
    return (
        isinstance(entry, Mapping)
        and set(entry) == {"file", "sha256"}
        and all(isinstance(value, str) for value in entry.values())
    )


def _patches(subject: str, pin: Mapping[str, Any], root: Path) -> Iterator[Finding]:
    """Patches of an engine: a list of file, relative to the root, and its sha256."""
    entries = pin.get("patches") or []
    if not isinstance(entries, list) or not all(map(_is_patch, entries)):
        fix = "write each patch as {file: path, relative to the project; sha256: of its content}"
        yield _finding("PIN-FORM", subject, "patches is no list of file and sha256", fix)
        return
    for item in entries:
        path = root / item["file"]
        if file_at(path) is None:
            yield _finding("PIN-PATCH", subject, f"the patch {item['file']} does not exist", "correct the path")
        elif (actual := hashlib.sha256(path.read_bytes()).hexdigest()) != item["sha256"]:
            message = f"the patch {item['file']} is not the pinned one"
            yield _finding("PIN-PATCH", subject, message, f"review the change, then write sha256: {actual}")


def _model(subject: str, pin: Mapping[str, Any], root: Path, inventory: Path) -> Iterator[Finding]:
    describe = _describe(pin, inventory / (pin.get("manifest") or f"manifests/{subject.split('.', 2)[-1]}.json"), root)
    elsewhere = bool(pin.get("paths") or pin.get("hub"))  # the hosts' own directories, or the hub
    if pin.get("source") is not None and not elsewhere and directory_at(root / pin["source"]) is None:
        message = f"the source {pin['source']} is no directory of this controller"
        fix = "put the files of the pinned revision there, or correct source; hosts that have them need no source: "
        yield _finding("PIN-SOURCE", subject, message, f"{fix}--skip-tags preflight")
    fills = {"revision": f"{describe}, then revision: COMMIT", "manifest": describe}
    needed = tuple(key for key in MODEL_KEYS if not (key == "source" and elsewhere))
    yield from _empty(subject, pin, needed, fills)
    if pin.get("manifest") is not None:
        yield from _manifest(subject, pin, inventory / pin["manifest"], describe)
    contract = pin.get("contract")
    if contract is None:
        return
    wrong = _misshapen(subject, {"contract": contract})
    yield from wrong
    if wrong:
        return
    yield from _empty(f"{subject}.contract", contract, CONTRACT_KEYS, FILLS)
    if contract.get("convention") not in (None, *CONVENTIONS):
        message = f"convention {contract['convention']!r} is none of {', '.join(CONVENTIONS)}"
        yield _finding("PIN-CONVENTION", f"{subject}.contract", message, "say whether layers name inputs or outputs")


def _describe(pin: Mapping[str, Any], manifest: Path, root: Path) -> str:
    """The command that writes a model's manifest, as typed in the project's directory."""
    place = manifest.relative_to(root) if manifest.is_relative_to(root) else manifest
    return (
        f"pivot manifest {pin.get('source')} --repository {pin.get('repository')}"
        f" --revision {pin.get('revision') or 'COMMIT'} --output {place}"
    )


def _manifest(subject: str, pin: Mapping[str, Any], path: Path, command: str) -> Iterator[Finding]:
    if file_at(path) is None:
        yield _finding("PIN-MANIFEST", subject, f"the manifest {pin['manifest']} cannot be read", command)
        return
    try:
        manifest = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict):
        yield _finding("PIN-MANIFEST", subject, f"the manifest {pin['manifest']} is no JSON object", command)
        return
    for key in ("repository", "revision"):
        if pin.get(key) is not None and manifest.get(key) != pin[key]:
            message = f"{key} is {pin[key]!r} here and {manifest.get(key)!r} in {pin['manifest']}"
            yield _finding("PIN-MANIFEST", subject, message, f"make them agree, or write the manifest anew: {command}")
