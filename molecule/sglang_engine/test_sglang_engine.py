"""The release on a real container: as locked, of root alone, usable by everybody; a fresh host has none."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import testinfra

PROJECT = Path(__file__).parents[2]
LOCK = PROJECT / "requirements/engine/cpu-py311.lock"
ASK = "import importlib.metadata as m; print(m.version('sglang'), m.version('torch'))"


def connect(request: pytest.FixtureRequest, name: str) -> Any:
    return testinfra.get_host(f"ansible://{name}", ansible_inventory=request.config.getoption("--ansible-inventory"))


@pytest.fixture(scope="module")
def host(request: pytest.FixtureRequest) -> Any:
    return connect(request, "instance")


@pytest.fixture(scope="module")
def release(host: Any) -> str:
    """The path of the release that `current` names."""
    return str(host.check_output("readlink -e /opt/sglang/current"))


def test_current_is_a_relative_link_to_a_release_with_its_digest(host: Any, release: str) -> None:
    assert release.startswith("/opt/sglang/releases/0.5.23-cpu-")
    assert host.file("/opt/sglang/current").linked_to == release
    assert host.check_output("readlink /opt/sglang/current") == "releases/" + Path(release).name


def test_the_record_names_the_lock_and_what_was_installed(host: Any, release: str) -> None:
    record = json.loads(host.file(f"{release}/release.json").content_string)
    assert record["lock_sha256"] == hashlib.sha256(LOCK.read_bytes()).hexdigest()
    locked = [line.split(" ")[0] for line in LOCK.read_text().splitlines() if "==" in line and line[0] != "#"]
    assert len(record["installed"]) == len(locked) + 1  # and the local distribution
    assert f"torch=={record['installed']['torch']}" in locked


def test_an_unprivileged_user_can_use_it(host: Any) -> None:
    user = "setpriv --reuid=65534 --regid=65534 --clear-groups"
    versions = host.check_output(f"cd / && {user} /opt/sglang/current/bin/python -I -c %s", ASK).split()
    assert versions[0] == "0.5.23"


def test_nobody_but_root_can_change_it(host: Any) -> None:
    assert host.check_output("find /opt/sglang ! -user root -o ! -type l -perm /022 | head") == ""


def test_no_script_names_the_directory_it_was_built_in(host: Any, release: str) -> None:
    assert host.run(f"grep -rIl /building/ {release}/bin {release}/pyvenv.cfg").stdout == ""


def test_nothing_is_half_made(host: Any, release: str) -> None:
    assert host.check_output("ls -A /opt/sglang/building /opt/sglang/releases").split() == [
        "/opt/sglang/building:",
        "/opt/sglang/releases:",
        Path(release).name,
    ]
    assert host.check_output("ls -A /opt/sglang").split() == ["building", "current", "logs", "releases"]


def test_a_host_where_it_was_not_built_has_none(request: pytest.FixtureRequest, host: Any) -> None:
    there = connect(request, "fresh").run("readlink /opt/sglang/current").stdout
    allowed = {"", host.run("readlink /opt/sglang/current").stdout} if os.environ.get("PIVOT_SOAK") else {""}
    assert there in allowed
