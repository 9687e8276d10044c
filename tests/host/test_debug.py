"""Debugging leaves nothing behind, and while it is on, everybody is told."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from testinfra.host import Host

if TYPE_CHECKING:
    from conftest import Settings


def test_the_probe_is_off_or_wholly_on(host: Host, settings: Settings, unit: dict[str, str], pid: int) -> None:
    root = settings["debug_probes_root"]
    environment = host.check_output("tr '\\0' '\\n' < /proc/%s/environ", str(pid)).splitlines()
    paths = next((line.partition("=")[2] for line in environment if line.startswith("PYTHONPATH=")), "")
    signs = {
        "drop-in": "pivot-probe" in unit.get("DropInPaths", ""),
        "directory": host.file(root).exists,
        "state": host.file(settings["debug_probes_state_file"]).exists,
        "running process": root in paths.split(":"),
    }
    assert len(set(signs.values())) == 1, (
        f"left half-way, `ansible-playbook deploy.yml --tags debug-off` ends it: {signs}"
    )
    if signs["drop-in"]:
        name = settings["inventory_hostname"]
        warnings.warn(
            f"DEBUG INSTRUMENTATION IS ON at {name}: figures of this server mean nothing; --tags debug-off removes it",
            stacklevel=1,
        )
