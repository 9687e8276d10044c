"""Debugging leaves nothing behind, and while it is on, everybody is told."""

from __future__ import annotations

import json
import warnings
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from testinfra.host import Host

from pivot.experiments import probe

if TYPE_CHECKING:
    from conftest import Settings


def test_the_probe_is_off_or_wholly_on(host: Host, settings: Settings, unit: dict[str, str], pid: int) -> None:
    root, state = settings["debug_probes_root"], host.file(settings["debug_probes_state_file"])
    environment = host.check_output("tr '\\0' '\\n' < /proc/%s/environ", str(pid)).splitlines()
    paths = next((line.partition("=")[2] for line in environment if line.startswith("PYTHONPATH=")), "")
    signs = {
        "drop-in": "pivot-probe" in unit.get("DropInPaths", ""),
        "directory": host.file(root).exists,
        "state": state.exists,
        "script that restores": host.file(str(PurePosixPath(state.path).with_name("restore.py"))).exists,
        "running process": root in paths.split(":"),
    }
    assert len(set(signs.values())) == 1, (
        f"left half-way, `ansible-playbook deploy.yml --tags debug-off` ends it: {signs}"
    )
    if state.exists:
        now = host.check_output("date --utc +%Y-%m-%dT%H:%M:%SZ")
        name = f"{settings['sglang_server_name']} at {settings['inventory_hostname']}"
        warnings.warn(probe.banner(name, json.loads(state.content_string), now), stacklevel=1)
