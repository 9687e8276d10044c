"""The same service after switching off: nothing of the probe is left but its records."""

from testinfra.host import Host


def test_unit_environment_command_line_and_engine_are_as_before(host: Host) -> None:
    assert host.check_output("/root/capture llm '*pivot-probe*'") + "\n" == host.file("/root/before").content_string


def test_switching_off_took_one_restart(host: Host) -> None:
    assert host.check_output("journalctl -u llm -o cat | grep -c '^Started llm.service'") == "3"
    assert host.check_output("systemctl show llm --property NRestarts --value") == "0"


def test_no_file_of_the_probe_is_left(host: Host) -> None:
    for path in ("/opt/pivot-probe", "/var/lib/pivot-probe", "/etc/systemd/system/llm.service.d/50-pivot-probe.conf"):
        assert not host.file(path).exists
    assert host.file("/etc/systemd/system/llm.service.d/10-site.conf").exists


def test_the_records_are_kept(host: Host) -> None:
    assert host.check_output("find /var/log/pivot-probe -name '*.jsonl' | wc -l") != "0"


def test_it_serves(host: Host) -> None:
    ask = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:31000/health', timeout=30).status)"
    assert host.check_output("python3 -c %s", ask) == "200"
