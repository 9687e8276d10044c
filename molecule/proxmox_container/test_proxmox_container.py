"""The container from the inside and as the node sees it; its host key was learnt, and no other is trusted."""

import os
from pathlib import Path
from typing import Any

import pytest
import testinfra

KNOWN_HOSTS = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"], "known_hosts")
MIB = 1 << 20


@pytest.fixture(scope="module")
def host(request: pytest.FixtureRequest) -> Any:
    inventory = request.config.getoption("--ansible-inventory")
    return testinfra.get_host("ansible://instance", ansible_inventory=inventory)


def test_it_runs_systemd_under_its_name(host: Any) -> None:
    assert host.check_output("hostname") == "molecule-190"
    assert host.check_output("systemctl is-system-running --wait") == "running"


def test_it_is_unprivileged(host: Any) -> None:
    inside, outside, _ = host.check_output("head -1 /proc/self/uid_map").split()
    assert (inside, int(outside) >= 100000) == ("0", True)


def test_its_memory_is_limited(host: Any) -> None:
    files = "/sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes"
    assert host.run(f"cat {files} 2>/dev/null").stdout.split() == [str(512 * MIB)]


def test_it_has_no_device_of_nvidia(host: Any) -> None:
    assert host.run("ls -d /dev/nvidia*").stdout == ""


def test_its_one_known_key_is_its_own(host: Any) -> None:
    address = host.check_output("hostname -I").split()[0]
    own = host.check_output("cut -d ' ' -f 1,2 /etc/ssh/ssh_host_ed25519_key.pub")
    assert KNOWN_HOSTS.read_text().splitlines() == [f"{address} {own}"]


def test_only_the_given_key_may_log_in(host: Any) -> None:
    assert len(host.check_output("cat /root/.ssh/authorized_keys").splitlines()) == 1
    assert host.check_output("stat -c '%a %U' /root/.ssh/authorized_keys") == "600 root"
