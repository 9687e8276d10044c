"""The container's devices are devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from testinfra.host import Host

from pivot.machines.device_nodes import device_paths

if TYPE_CHECKING:
    from conftest import Settings


def test_devices_of_the_container_are_nodes_and_not_files(host: Host, settings: Settings) -> None:
    kinds = {
        path: host.run("stat -c %%F %s", path).stdout.strip() or "missing"
        for path in device_paths(settings.get("proxmox_container_devices", []))
    }
    assert {path: kind for path, kind in kinds.items() if kind != "character special file"} == {}
