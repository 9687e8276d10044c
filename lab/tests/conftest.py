"""Fixtures of the lab's tests: a lab of their own under .cache, so that the clone's lab is never touched."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pivot_lab.layout import Layout

from pivot.pve import proxmox_api

from .faults import NEIGHBOUR, Faults
from .standin import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

CLONE = Path(__file__).resolve().parents[2]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "lxc: needs root, LXC and a kernel with overlayfs; makes real containers")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("lxc") and (os.geteuid() != 0 or shutil.which("lxc-start") is None):
        pytest.skip("needs root and the Debian packages of lab/debian-packages.txt")


class Lab:
    """A lab at a fixed path of its own, so that what a killed test run left is found and removed by the next."""

    def __init__(self, name: str) -> None:
        self.layout = Layout.of(CLONE / ".cache" / name, CLONE / ".cache")
        self.layout.root.mkdir(parents=True, exist_ok=True)

    def run(self, *args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run `pivot-lab` for this lab, as a person does whose umask hides everything from others."""
        command = [
            sys.executable,
            "-m",
            "pivot_lab",
            "--root",
            str(self.layout.root),
            "--cache",
            str(self.layout.cache),
        ]
        done = subprocess.run([*command, *args], capture_output=True, text=True, check=False, umask=0o077)
        if check and done.returncode != 0:
            raise AssertionError(f"pivot-lab {' '.join(args)} failed:\n{done.stdout}{done.stderr}")
        return done

    def ssh(self, address: str, command: str, known_hosts: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a shell command in a container, its host key verified."""
        options = [
            f"UserKnownHostsFile={known_hosts or self.layout.known_hosts}", "GlobalKnownHostsFile=/dev/null",
            "StrictHostKeyChecking=yes", "BatchMode=yes", "ConnectTimeout=10",
        ]  # fmt: skip
        flags = [part for option in options for part in ("-o", option)]
        return subprocess.run(
            ["ssh", "-i", str(self.layout.ssh_key), *flags, f"root@{address}", command],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """A lab that is up; down at the end of the session."""
    made = Lab("lab-under-test")
    made.run("down")
    made.run("up")
    yield made
    made.run("down")


@pytest.fixture(scope="session")
def neighbour() -> Iterator[Lab]:
    """Another lab on the same machine, of which only scratch containers are used."""
    made = Lab("lab-next-door")
    made.run("down")
    yield made
    made.run("down")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    faults = Faults()
    made = Server(tmp_path_factory.mktemp("faults"), middlewares=[faults.middleware])
    made.faults = faults
    made.finish(made.call("ticket", "POST", "/nodes/pve1/lxc", NEIGHBOUR)[2]["data"])
    yield made
    made.close()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxmox_api, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(proxmox_api, "SHOW_SECONDS", 0.3)
    monkeypatch.setattr(proxmox_api, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(proxmox_api, "PATIENCE_SECONDS", 60.0)


@pytest.fixture
def faults(server: Server, hasty: None) -> Iterator[Faults]:
    """No container of ours, no fault planned; the neighbour as it was before and after."""
    server.faults.clear()
    before = server.call("ticket", "GET", "/nodes/pve1/lxc/107/config")
    yield server.faults
    server.faults.clear()
    assert server.call("ticket", "GET", "/nodes/pve1/lxc/107/config") == before
    guest = server.pve.ct(101)
    if guest is not None:
        if guest.status == "running":
            server.finish(server.call("ticket", "POST", "/nodes/pve1/lxc/101/status/stop", {})[2]["data"])
        server.call("ticket", "PUT", "/nodes/pve1/lxc/101/config", {"protection": 0})
        server.finish(server.call("ticket", "DELETE", "/nodes/pve1/lxc/101")[2]["data"])
