"""What the role may write is there, before the containers' start at boot, and nothing else is."""

from typing import Any

PLACES = "/dev /etc /home /opt /root /srv /usr /var/cache /var/lib /var/tmp"
UNIT = "/etc/systemd/system/pivot-nvidia-nodes.service"
WRITTEN = {
    UNIT,
    "/etc/systemd/system/multi-user.target.wants/pivot-nvidia-nodes.service",
    "/etc/modprobe.d/pivot-nvidia-uvm.conf",
}


def test_device_nodes_are_made_before_containers_start(host: Any) -> None:
    unit = host.service("pivot-nvidia-nodes")
    assert unit.is_enabled
    assert unit.is_running
    assert "pve-guests.service" in unit.systemd_properties["Before"].split()
    assert host.file("/run/made-nodes").content_string.split() == ["-u", "-m", "-c", "0"]


def test_the_unit_is_as_systemd_wants_it(host: Any) -> None:
    assert host.run("systemd-analyze verify %s", UNIT).stderr == ""


def test_the_option_of_the_module(host: Any) -> None:
    text = host.file("/etc/modprobe.d/pivot-nvidia-uvm.conf").content_string
    assert "options nvidia_uvm uvm_disable_hmm=1" in text.splitlines()


def test_nothing_else_was_written(host: Any) -> None:
    newer = host.check_output(f"find {PLACES} -newer /root/before -not -path /root/before -not -type c -not -type d")
    assert set(newer.splitlines()) == WRITTEN


def test_a_new_file_would_be_seen(host: Any) -> None:
    host.check_output("touch /opt/new")
    newer = host.check_output(f"find {PLACES} -newer /root/before -type f -path '/opt/*'")
    host.check_output("rm /opt/new")
    assert newer.splitlines() == ["/opt/new"]
