"""Wheels on their way, through the real rsync and a shell that stands for ssh."""

import os
import subprocess
from pathlib import Path

import pytest

from pivot.engines import sending

HOST = {"inventory_hostname": "infer1", "ansible_host": "10.0.0.2", "ansible_user": "root"}
PIP = "pip-26.3-py3-none-any.whl"
WHEELS = {PIP: "pip", "torch-2.9.1-cp311-cp311-linux_x86_64.whl": "torch"}


@pytest.fixture
def wheelhouse(tmp_path: Path) -> Path:
    place = tmp_path / "house"
    (place / "wheels").mkdir(parents=True)
    for name, text in WHEELS.items():
        (place / "wheels" / name).write_text(text)
    for name in ("requirements.txt", "manifest.json"):
        (place / name).write_text(name)
    return place


@pytest.fixture(autouse=True)
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ssh would run on the host is run here."""
    there = tmp_path / "bin/ssh"
    there.parent.mkdir()
    there.write_text('#!/bin/sh\nwhile [ "$1" != 10.0.0.2 ]; do shift; done\nshift\nexec sh -c "$*"\n')
    there.chmod(0o755)
    monkeypatch.setenv("PATH", f"{there.parent}:{os.environ['PATH']}")


def there(path: Path) -> dict[str, str]:
    return {str(file.relative_to(path)): file.read_text() for file in path.rglob("*") if file.is_file()}


def send(wheelhouse: Path, incoming: Path, shared: str = "") -> list[str]:
    """Names of what was sent."""
    sent: list[str] = []
    calls = sending.commands(str(wheelhouse), str(incoming), shared, PIP, HOST)
    for call in filter(None, (calls["shared"], calls["own"])):
        incoming.mkdir(parents=True, exist_ok=True)
        command = [call[0], "--out-format=%n", *call[1:]]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        sent += [line for line in done.stdout.splitlines() if not line.endswith("/")]
    return sorted(line for line in sent if not line.startswith("deleting "))


def test_a_host_gets_the_whole_wheelhouse_and_nothing_else(wheelhouse: Path, tmp_path: Path) -> None:
    incoming = tmp_path / "incoming"
    (incoming / "wheels").mkdir(parents=True)
    (incoming / "wheels/old.whl").write_text("of another lock")
    send(wheelhouse, incoming)
    assert there(incoming) == there(wheelhouse)


def test_the_second_host_of_a_node_is_sent_what_it_may_not_take_from_others(wheelhouse: Path, tmp_path: Path) -> None:
    shared = tmp_path / "it's shared/0af3"
    shared.mkdir(parents=True)
    (shared / "left.whl").write_text("of an interrupted run")
    own = {"requirements.txt": "requirements.txt", f"wheels/{PIP}": "pip"}
    first = send(wheelhouse, tmp_path / "one", str(shared))
    assert first == sorted([*WHEELS, *own])
    assert there(shared) == WHEELS
    assert there(tmp_path / "one") == own
    assert send(wheelhouse, tmp_path / "two", str(shared)) == sorted(own)
    assert there(tmp_path / "two") == own


def test_a_second_sender_waits_for_the_first(wheelhouse: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    with subprocess.Popen(
        ["flock", str(shared), "sh", "-c", f"echo; sleep 1; touch {tmp_path}/over"], stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        send(wheelhouse, tmp_path / "one", str(shared))
        assert (tmp_path / "over").exists()
