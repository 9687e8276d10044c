"""Whether a container's driver libraries have to be installed, and from what: one pinned installer, or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pivot.findings import Finding, Severity
from pivot.machines.drivers import driver_version, pinned_away
from pivot.places import file_at

PARTS = ("libcuda", "libnvidia-ml")


def plan(facts: Mapping[str, Any], options: Mapping[str, Any], host: str) -> dict[str, Any]:
    """What to do: ``action`` (none, install or remove), ``hold`` (whether apt has to be told) and ``findings``.

    facts: of runtime_facts.py; options: accelerator, driver (pinned version), file (the installer on the controller,
    empty where this project installs none), sha256 and state (present or absent). Reads the installer, nothing else.
    """
    nothing = {"action": "none", "hold": False, "findings": []}
    if options["accelerator"] != "cuda" or not options["file"]:
        return nothing
    if options["state"] == "absent":
        return nothing | {"action": "remove" if facts["uninstaller"] or facts["preferences"] else "none"}
    pin = str(options["driver"])
    if pin and installed(facts["libraries"]) == {pin} and facts["smi"]["there"] and not facts["packages"]["installed"]:
        return nothing | {"hold": not pinned_away(facts["packages"]["pins"])}
    found = [finding.as_dict() for finding in _obstacles(facts, options, host)]
    return {"action": "none" if found else "install", "hold": not found, "findings": found}


def installed(libraries: Sequence[str]) -> set[str]:
    """Versions of the driver's libraries; with "" where one of the two that matter is missing."""
    versions = {part: {driver_version(name) for name in libraries if name.startswith(part)} for part in PARTS}
    return set().union(*(found or {""} for found in versions.values()))


def _obstacles(facts: Mapping[str, Any], options: Mapping[str, Any], host: str) -> list[Finding]:
    """Why nothing can be installed: the node, the container, or the file; the first of them alone."""
    pin, loaded = str(options["driver"]), driver_version(facts["module"])
    if not pin:
        text = "gpu_runtime_driver_file is set, but gpu_runtime_driver, the version that it has to be, is not"
        return [Finding("HOST-DRIVER-UNPINNED", Severity.ERROR, host, text, "write the version to the last number")]
    if loaded and loaded != pin:
        text = f"the node's module is {loaded}, the pin says {pin}: libraries of the pin would not work with it"
        fix = "bring the node to the pin (its module, then a reboot), or correct the pin and its file"
        return [Finding("HOST-DRIVER-NODE", Severity.ERROR, host, text, fix)]
    if names := sorted(facts["packages"]["installed"]):
        text = f"the container has driver packages ({', '.join(names[:4])}), which would undo what an installer writes"
        return [Finding("HOST-DRIVER-PACKAGES", Severity.ERROR, host, text, f"apt-get purge {' '.join(names)} in it")]
    wrong = wrong_file(Path(options["file"]), str(options["sha256"]), pin)
    if not wrong:
        return []
    fix = "get the file of the pinned version again, and compare its sha256 with what NVIDIA publishes"
    return [Finding("HOST-DRIVER-FILE", Severity.ERROR, host, wrong, fix)]


def wrong_file(path: Path, sha256: str, pin: str) -> str:
    """What is wrong with an installer as a sentence, empty when it is the pinned one."""
    if file_at(path) is None:
        return f"the installer {path} is no file of this controller"
    if pin not in path.name:
        return f"the installer {path.name} does not carry the pinned version {pin} in its name"
    if not sha256:
        return f"the installer {path.name} has no pinned checksum"
    with path.open("rb") as stream:
        actual = hashlib.file_digest(stream, "sha256").hexdigest()
    return "" if actual == sha256.lower() else f"the installer {path.name} has sha256 {actual}, the pin says {sha256}"
