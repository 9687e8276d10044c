"""The role only reads: nothing on the container is newer than what was there before."""

from typing import Any

import pytest
import testinfra

PLACES = "/dev /etc /home /opt /root /srv /usr /var/cache /var/lib /var/tmp"


@pytest.fixture(scope="module")
def host(request: pytest.FixtureRequest) -> Any:
    """The scenario's own container; the lab's node is everybody's."""
    inventory = request.config.getoption("--ansible-inventory")
    return testinfra.get_host("ansible://instance", ansible_inventory=inventory)


def test_nothing_was_written(host: Any) -> None:
    newer = host.check_output(f"find {PLACES} -newer /root/before -not -path /root/before -not -type c").splitlines()
    assert [path for path in newer if path not in ("/dev", "/root")] == []


def test_a_new_file_would_be_seen(host: Any) -> None:
    host.check_output("touch /opt/new")
    newer = host.check_output(f"find {PLACES} -newer /root/before -type f")
    host.check_output("rm /opt/new")
    assert newer.splitlines() == ["/opt/new"]
