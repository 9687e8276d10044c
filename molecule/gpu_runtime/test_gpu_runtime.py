"""The driver's user space is there, of the pinned version and kept from upgrades; nothing else was written."""

from typing import Any

import pytest
import testinfra

PLACES = "/dev /etc /home /lib/modules /opt /root /srv /usr /var/cache /var/lib /var/tmp"
LIBRARIES = "/usr/lib/x86_64-linux-gnu"
WRITTEN = {
    *(f"{LIBRARIES}/{name}.so.580.95.05" for name in ("libcuda", "libnvidia-ml")),
    *(f"{LIBRARIES}/{name}.so.1" for name in ("libcuda", "libnvidia-ml")),
    "/etc/apt/preferences.d/pivot-nvidia",
    "/usr/bin/nvidia-smi",
    "/usr/bin/nvidia-uninstall",
}


@pytest.fixture(scope="module")
def host(request: pytest.FixtureRequest) -> Any:
    """The scenario's own container; the lab's node is everybody's."""
    inventory = request.config.getoption("--ansible-inventory")
    return testinfra.get_host("ansible://instance", ansible_inventory=inventory)


def test_nothing_but_the_driver_was_written(host: Any) -> None:
    newer = host.run(f"find {PLACES} -newer /root/before -not -path /root/before -not -type c -not -type d").stdout
    assert set(newer.splitlines()) == WRITTEN


def test_a_new_file_would_be_seen(host: Any) -> None:
    host.check_output("touch /opt/new")
    newer = host.check_output("find /opt -newer /root/before -type f")
    host.check_output("rm /opt/new")
    assert newer.splitlines() == ["/opt/new"]


def test_apt_brings_no_other_driver(host: Any) -> None:
    said = host.check_output("apt-cache policy nvidia-driver libnvidia-ml1 libcuda1")
    assert "Candidate: 5" not in said
    pinned = host.check_output("apt-config dump Dir::Etc::PreferencesParts")
    assert "preferences.d" in pinned
    assert "Pin-Priority: -1" in host.file("/etc/apt/preferences.d/pivot-nvidia").content_string
