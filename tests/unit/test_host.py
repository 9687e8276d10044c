"""Nodes and containers: texts as machines gave them, verdicts written by hand."""

from pathlib import Path
from typing import Any

import pytest

from pivot.findings import Finding, Severity
from pivot.machines import asking, device_nodes, host, limits

# an inside of a container, and what its node's driver says
FIELD = Path(__file__).parents[1] / "data/field-cases"
B09 = (FIELD / "B09-stat.txt").read_text()
DEVICES = (
    "Character devices:\n  1 mem\n195 nvidia-frontend\n234 nvidia-caps\n511 nvidia-uvm\n\nBlock devices:\n  8 sd\n"
)
SEGMENT = "/dev/shm/nccl-Ab12Cd"  # noqa: S108 - a name in a report, nothing is written there
BLACKWELL = "01:00.0 3D controller: NVIDIA Corporation GB202GL [RTX PRO 6000 Blackwell Server Edition] (rev a1)"


def devices(text: str, *wanted: str, container: bool = True) -> list[Finding]:
    return device_nodes.device_findings(
        wanted, device_nodes.parse_stat(text.splitlines()), device_nodes.parse_majors(DEVICES), "h", container
    )


def test_only_the_file_in_place_of_a_device_is_a_fault() -> None:
    (finding,) = devices(B09, "/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm")
    assert (finding.code, finding.severity, finding.subject) == (
        "HOST-DEVICE-FILE",
        Severity.ERROR,
        "h, /dev/nvidia-uvm",
    )
    assert "source was missing on the node when the container started" in finding.message
    assert "restart the container" in finding.fix


def test_a_node_of_another_language_is_asked_in_english(monkeypatch: pytest.MonkeyPatch) -> None:
    """stat's own words for a device are translated: `zeichenorientierte Spezialdatei`."""
    for name in ("LANG", "LC_ALL", "LC_MESSAGES"):
        monkeypatch.setenv(name, "de_DE.UTF-8")
    monkeypatch.setenv("LANGUAGE", "de:en")  # stronger than LC_ALL=C.UTF-8 with glibc 2.36
    assert asking.run("sh", "-c", "echo $LC_ALL,$LANGUAGE,$LANG") == (0, "C.UTF-8,,de_DE.UTF-8\n", "")


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("/dev/nvidia3|character special file|c3:3|666|0", None),
        ("/dev/nvidia3|character special file|195:3|666|0", "HOST-DEVICE-NUMBER"),  # 0x195: decimal read as hexadecimal
        ("/dev/nvidia3|character special file|c3:2|666|0", "HOST-DEVICE-NUMBER"),
        ("/dev/nvidiactl|character special file|c3:ff|666|0", None),
        ("/dev/nvidia-modeset|character special file|c3:fe|666|0", None),
        ("/dev/nvidia-uvm|character special file|1ff:0|666|0", None),
        ("/dev/nvidia-uvm-tools|character special file|1ff:1|666|0", None),
        ("/dev/nvidia-uvm|character special file|1fb:0|666|0", "HOST-DEVICE-NUMBER"),  # 507, before the last reboot
        ("/dev/nvidia-uvm|character special file|1ff:1|666|0", "HOST-DEVICE-NUMBER"),  # that one is the tools'
        ("/dev/nvidia-uvm-tools|character special file|1ff:0|666|0", "HOST-DEVICE-NUMBER"),
        ("/dev/nvidia-caps/nvidia-cap1|character special file|ea:1|400|0", None),
        ("/dev/nvidia-caps/nvidia-cap1|character special file|ec:1|400|0", "HOST-DEVICE-NUMBER"),
        ("/dev/nvidia0|character special file|c3:0|660|65534", "HOST-DEVICE-OWNER"),
        ("/dev/nvidia0|directory|0:0|755|0", "HOST-DEVICE-KIND"),
        ("/dev/nvidia0|regular file|0:0|0|0", "HOST-DEVICE-FILE"),
        ("/dev/other|character special file|a:1|666|0", None),
    ],
)
def test_one_device(line: str, code: str | None) -> None:
    found = devices(line, line.partition("|")[0] + ",mode=0666")
    assert [finding.code for finding in found] == ([code] if code else [])


def test_numbers_of_a_driver_that_is_not_loaded_are_not_judged() -> None:
    nodes = device_nodes.parse_stat(["/dev/nvidia-uvm|character special file|1fb:0|666|0"])
    assert device_nodes.device_findings(["/dev/nvidia-uvm"], nodes, {}, "h", container=True) == []
    majors = device_nodes.parse_majors(DEVICES.replace("511 nvidia-uvm\n", ""))  # a card's driver is, this one is not
    (finding,) = device_nodes.device_findings(["/dev/nvidia-uvm"], nodes, majors, "h", container=True)
    assert finding.code == "HOST-DEVICE-NUMBER"
    assert "nvidia-uvm is not loaded" in finding.message


def test_a_missing_device_has_another_fix_on_the_node() -> None:
    (inside,), (outside,) = devices("", "/dev/nvidia1"), devices("", "/dev/nvidia1", container=False)
    assert inside.code == outside.code == "HOST-DEVICE-MISSING"
    assert "proxmox_container_devices" in inside.fix
    assert "nvidia-modprobe" in outside.fix


def test_device_paths_in_all_notations() -> None:
    assert device_nodes.device_paths(["/dev/a,mode=0666", "mode=0666,path=/dev/b", "/dev/c"]) == [
        "/dev/a",
        "/dev/b",
        "/dev/c",
    ]


def test_a_line_that_is_no_stat_line_is_named() -> None:
    with pytest.raises(ValueError, match="stat: cannot statx"):
        device_nodes.parse_stat(["stat: cannot statx '/dev/nvidia9'"])


@pytest.mark.parametrize(
    ("lines", "fires"),
    [
        (["root:100000:65536"], False),
        (["root:1:100", "root:100000:131072"], False),
        ([], True),
        (["root:100000:1000"], True),
        (["you:100000:65536"], True),
        (["root:100000:x"], True),
    ],
)
def test_id_ranges(lines: list[str], fires: bool) -> None:
    assert bool(host.idmap_findings({"subuid": lines}, "h")) is fires


def memory(**shm: Any) -> list[Finding]:
    facts = {"shm": {"bytes": 16 << 30, "free": 15 << 30, "mode": "1777", "left_behind": [], **shm}, "memlock": -1}
    return limits.memory_findings(facts, "h", 8192, memlock_unlimited=True)


def test_shared_memory_is_small_and_full_b15() -> None:
    _, size, _, free, *_ = (FIELD / "B15-df.txt").read_text().split()
    small, full = memory(bytes=int(size.rstrip("K")) << 10, free=int(free.rstrip("K")) << 10, left_behind=[SEGMENT])
    assert (small.code, full.code) == ("HOST-SHM-SMALL", "HOST-SHM-FULL")
    assert "64 MiB" in small.message
    assert SEGMENT in small.message
    assert "size=8192M" in small.fix
    assert full.fix == f"rm {SEGMENT}"


def test_other_faults_of_memory() -> None:
    assert memory() == []
    assert [finding.code for finding in memory(mode="755")] == ["HOST-SHM-MODE"]
    assert [finding.code for finding in memory(left_behind=[SEGMENT])] == ["HOST-SHM-LEFTOVERS"]
    facts = {"shm": {"bytes": 1 << 40, "free": 1 << 40, "mode": "1777", "left_behind": []}, "memlock": 8 << 20}
    assert [finding.code for finding in limits.memory_findings(facts, "h", 1, memlock_unlimited=True)] == [
        "HOST-MEMLOCK"
    ]
    assert limits.memory_findings(facts, "h", 1, memlock_unlimited=False) == []


NODE: dict[str, Any] = {
    "stat": B09.splitlines(),
    "drivers": DEVICES,
    "license": "NVIDIA",
    "module": "",
    "lspci": [BLACKWELL.replace("GB202GL [RTX PRO 6000 Blackwell Server Edition]", "Device [10de:2bb5]")],
    "pve": "pve-manager/9.2.11/0123456789abcdef",
    "subids": {"subuid": [], "subgid": ["root:100000:65536"]},
    "config": "",
    "cgroup": {},
}
OF_A_NODE: dict[str, Any] = {
    "devices": ["/dev/nvidiactl", "/dev/x"],
    "vmid": None,
    "iommu": "undecided",
    "shared": False,
}


def test_a_node_and_a_container_as_a_whole() -> None:
    found = host.node(NODE, OF_A_NODE, "n")
    assert [finding.code for finding in found] == ["HOST-DEVICE-MISSING", "HOST-MODULE-FLAVOUR", "HOST-IDMAP"]
    assert (
        host.node({**NODE, "license": "Dual MIT/GPL", "pve": ""}, {**OF_A_NODE, "devices": ["/dev/nvidia0"]}, "n") == []
    )
    inside: dict[str, Any] = {
        "stat": B09.splitlines(),
        "drivers": DEVICES,
        "memlock": 65536,
        "module": "",
        "programs": ["nft", "rsync"],
        "libraries": [],
        "memory": {"total": 1 << 40, "max": -1, "high": -1},
        "packages": {"installed": {}, "held": [], "pins": [], "unattended": "", "timer": ""},
        "loader": [],
    }
    inside["shm"] = {"bytes": 1 << 30, "free": 1 << 30, "mode": "1777", "left_behind": []}
    options = {"devices": ["/dev/nvidia0"], "accelerator": "cpu", "shm_min_mib": "64", "driver": "", "pending": False}
    options |= {"weights_gib": "0", "programs": ["rsync", "nft"]}
    assert host.runtime(inside, options, "h") == []
    (bare,) = host.runtime({**inside, "programs": []}, options, "h")
    assert bare.message == "rsync and nft are not in the container: later steps call them"
    assert bare.fix.startswith("in the container: apt-get install rsync nftables; ")
    (one,) = host.runtime({**inside, "programs": ["rsync"]}, options, "h")
    assert (one.code, one.message) == ("HOST-PROGRAM", "nft is not in the container: later steps call it")
    wanted = {**options, "programs": ["rsync", "nft", "c++", "nvcc"]}
    (compilers,) = host.runtime(inside, wanted, "h")
    assert compilers.message == "c++ and nvcc are not in the container: later steps call them"
    assert "apt-get install g++ cuda-toolkit-13-0; " in compilers.fix
    assert host.runtime({**inside, "programs": wanted["programs"]}, wanted, "h") == []
    cuda = host.runtime(inside, {**options, "accelerator": "cuda"}, "h")
    assert [finding.code for finding in cuda] == ["HOST-MEMLOCK", "HOST-DRIVER-MODULE"]
    assert [f.code for f in host.runtime(inside, {**options, "accelerator": "cuda", "pending": True}, "h")] == [
        "HOST-MEMLOCK"
    ]


@pytest.mark.parametrize(
    ("pve", "severity"),
    [
        ("pve-manager/9.2.11/0123 (running kernel: 6.17.4-2-pve)", None),
        ("pve-manager/8.2.0/0123", None),
        ("pve-manager/8.1.4/0123", Severity.ERROR),
        ("pve-manager/7.4-3/0123", Severity.ERROR),
        ("pve-manager/10.0.1/0123", Severity.WARNING),
        ("", None),
    ],
)
def test_versions_of_proxmox(pve: str, severity: Severity | None) -> None:
    found = host.version_findings(pve, "n")
    assert [(f.code, f.severity) for f in found] == ([("HOST-PVE-VERSION", severity)] if severity else [])


UNITS = [{"Id": "pivot-nvidia-nodes.service", "UnitFileState": "enabled", "ExecStart": "/usr/bin/nvidia-modprobe -u"}]


@pytest.mark.parametrize(
    ("units", "udev", "wanted", "fires"),
    [
        (UNITS, [], "/dev/nvidia-uvm", False),
        ([], ['ACTION=="add", RUN+="/usr/bin/nvidia-modprobe -c0 -u"'], "/dev/nvidia-uvm", False),
        ([], [], "/dev/null", False),
        ([], [], "/dev/nvidia-uvm,mode=0666", True),
        ([{**UNITS[0], "UnitFileState": "disabled"}], [], "/dev/nvidia0", True),
        ([{**UNITS[0], "ExecStart": "/usr/bin/nvidia-persistenced"}], [], "/dev/nvidia0", True),
    ],
)
def test_nodes_after_the_next_boot(units: list[dict[str, str]], udev: list[str], wanted: str, fires: bool) -> None:
    found = device_nodes.boot_findings({"before_guests": units, "udev": udev}, [wanted], "n")
    assert [finding.code for finding in found] == (["HOST-BOOT-NODES"] if fires else [])


@pytest.mark.parametrize(
    ("total", "limit", "weights", "fires"),
    [
        (768, -1, 510, False),
        (768, -1, 0, False),
        (256, -1, 510, True),
        (768, 100, 510, True),
        (510, -1, 510, True),  # Proxmox slows down 128 MiB below the limit
        (511, -1, 510, False),
    ],
)
def test_memory_against_weights(total: int, limit: int, weights: float, fires: bool) -> None:
    memory = {"total": total << 30, "max": limit << 30 if limit > 0 else -1, "high": -1}
    found = limits.weight_findings(memory, weights, "h")
    assert [finding.code for finding in found] == (["HOST-MEMORY-HIGH"] if fires else [])


def test_where_proxmox_begins_to_slow_down() -> None:
    assert limits.throttled_from(16 << 30) == (16 << 30) - (128 << 20)
    assert limits.throttled_from(512 << 20) == 508 << 20


def test_listeners() -> None:
    text = """\
LISTEN 0 128 0.0.0.0:22 0.0.0.0:* ino:1 sk:1 cgroup:/x <->
LISTEN 0 2048 10.0.0.1:30000 0.0.0.0:* uid:998 ino:2 sk:2 cgroup:/y <->
LISTEN 0 128 [::]:30001 [::]:* uid:998 ino:3 sk:3 v6only:0 <->
LISTEN 0 128 127.0.0.53%lo:53 0.0.0.0:* uid:101 ino:4 sk:4 <->
"""
    assert host.parse_listeners(text) == [
        host.Listener("0.0.0.0", 22, 0),  # noqa: S104 - an address in a report
        host.Listener("10.0.0.1", 30000, 998),
        host.Listener("::", 30001, 998),
        host.Listener("127.0.0.53", 53, 101),
    ]


@pytest.mark.parametrize(
    ("written", "meant"),
    [("192.0.2.11", {"192.0.2.11"}), ("2001:DB8::0:11", {"2001:db8::11"}), ("0.0.0.0", {"0.0.0.0"})],  # noqa: S104 - the same
)
def test_addresses_in_any_spelling(written: str, meant: set[str]) -> None:
    assert host.addresses_of(written) == meant


def test_addresses_of_a_name() -> None:
    assert "127.0.0.1" in host.addresses_of("localhost")
    with pytest.raises(OSError, match="ame"):
        host.addresses_of("nowhere.invalid")


def test_properties() -> None:
    assert host.parse_properties("A=b\nC=\nD=e=f\nnothing\n") == {"A": "b", "C": "", "D": "e=f"}
