"""Faults that the field reported, each as a bundle shows it: seen where it is, silent where something looks like it.

The keys are those of the field's list of known faults. What only preflight, or nobody, can see is not here.
"""

# ruff: noqa: E501 - lines as they are logged

import json
from pathlib import Path
from typing import Any

import pytest

from pivot.logs.diagnosis import State, diagnose
from pivot.logs.evidence import read

from .server_bundle import FAILED, SCHEDULER, SERVER, at, codes, crash, decode, look, start, unit
from .test_suspects_told import failed, serves

# --- what the kernel, of the container or of the node, tells


@pytest.mark.parametrize("name", ["system/kernel.log", "node/kernel.log"])
@pytest.mark.parametrize(
    ("fault", "code", "line"),
    [
        ("H-08", "DIAG-DRIVER", "NVRM: API mismatch: the client has the version 580.105.08, but this kernel module 580.95.05"),
        ("H-09", "DIAG-MODULES", "NVRM: installed in this system requires use of the NVIDIA open kernel modules."),
        ("H-09", "DIAG-MODULES", "NVRM: GPU 0000:01:00.0: RmInitAdapter failed! (0x22:0x56:884)"),
        ("H-09 Xid", "DIAG-GPU-LOST", "NVRM: Xid (PCI:0000:c1:00): 169, GPU initialisation"),
        ("H-10 GSP", "DIAG-GPU-LOST", "NVRM: Xid (PCI:0000:a1:00): 120, GSP task timeout @ pc:0x1"),
        ("H-10 bus", "DIAG-GPU-LOST", "NVRM: GPU at PCI:0000:a1:00: GPU has fallen off the bus."),
        ("H-10 link", "DIAG-PCIE-LINK", "pcieport 0000:a0:01.1: AER: Uncorrectable (Fatal) error received from 0000:a1:00.0"),
        ("H-10 link down", "DIAG-PCIE-LINK", "pcieport 0000:a0:01.1: pciehp: Slot(3): Surprise Link Down"),
        ("H-16", "DIAG-HOST-MEMORY", "Memory cgroup out of memory: Killed process 4242 (sglang::schedul) total-vm:1kB"),
    ],
)  # fmt: skip
def test_what_the_kernel_tells(tmp_path: Path, fault: str, code: str, line: str, name: str) -> None:
    found = serves(tmp_path, **{name: f"[ 812.1] usb 1-1: new device\n[ 900.4] {line}\n"})
    assert codes(found) == [code]
    assert [(one.file, one.line) for one in found.suspects[0].evidence] == [(name, 2)]


def test_a_kernel_log_alone_b13(tmp_path: Path) -> None:
    file = tmp_path / "dmesg.txt"
    file.write_text("[ 812.1] NVRM: Xid (PCI:0000:b1:00): 62, 00000000 00000000 (GSP halt)\n")
    found = diagnose(read(file))
    assert (found.verdict.state, codes(found)) == (State.UNKNOWN, ["DIAG-GPU-LOST"])
    file.write_text(start() + "[ 812.1] NVRM: Xid (PCI:0000:b1:00): 62, in a server's log it is a quotation\n")
    assert codes(diagnose(read(file))) == []


def test_what_the_kernel_says_all_the_time_is_silent(tmp_path: Path) -> None:
    lines = (
        "nvidia: module license 'Dual MIT/GPL' taints kernel.",
        "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.95.05",
        "pcieport 0000:a0:01.1: AER: Correctable error received: 0000:a1:00.0",
        "NVRM: Xid (PCI:0000:21:00): 31, pid=4242, name=other",
        'audit: apparmor="DENIED" operation="mount" profile="lxc-101_</var/lib/lxc>"',
    )
    kernel = "".join(f"[ 9.{number}] {line}\n" for number, line in enumerate(lines))
    assert codes(serves(tmp_path, **{"node/kernel.log": kernel})) == []


def test_devices_that_came_after_the_container_h04(tmp_path: Path) -> None:
    line = "2026-11-29T09:00:01+0000 pve1 pve-container[9]: lxc-pve-prestart-hook: Could not get mode or device ID of /dev/nvidia-uvm\n"
    found = serves(tmp_path, **{"node/container.log": line})
    assert (found.verdict.state, codes(found)) == (State.SERVING, ["DIAG-DEVICE-LATE"])
    (tmp_path / "well").mkdir()
    line = "2026-11-29T09:00:01+0000 pve1 systemd[1]: Started pve-container@101.service - PVE LXC Container: 101.\n"
    assert codes(serves(tmp_path / "well", **{"node/container.log": line})) == []


def test_xids_from_before_the_last_boot_are_past_b13(tmp_path: Path) -> None:
    kernel = (
        "2026-11-28T10:00:00+0000 pve1 kernel: NVRM: Xid (PCI:0000:a1:00): 79, GPU has fallen off the bus.\n"
        "2026-11-29T09:00:00+0000 pve1 kernel: Linux version 6.17.4-2-pve (build@proxmox) (gcc) #1 SMP\n"
    )
    assert codes(serves(tmp_path, **{"node/kernel.log": kernel})) == []
    after = (
        kernel + "2026-11-29T10:01:00+0000 pve1 kernel: NVRM: Xid (PCI:0000:a1:00): 79, GPU has fallen off the bus.\n"
    )
    (tmp_path / "after").mkdir()
    found = serves(tmp_path / "after", **{"node/kernel.log": after})
    assert [(one.line) for one in found.suspects[0].evidence][:1] == [3]


XID = "2026-11-29T10:01:00+0000 pve1 kernel: NVRM: Xid (PCI:0000:{0}:00): {1}\n"
RESET = XID.format("a1", "154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)")


def test_a_card_that_was_reset_is_well_again(tmp_path: Path) -> None:
    gone = "2026-11-29T10:01:01+0000 pve1 kernel: NVRM: GPU 0000:a1:00.0: GPU has fallen off the bus.\n"
    kernel = XID.format("a1", "119, Timeout after 45s of waiting for RPC response from GPU0 GSP!") + gone
    for number, (more, expected) in enumerate(
        (("", ["DIAG-GPU-LOST"]), (RESET, []), (RESET + XID.format("a1", "119, again"), ["DIAG-GPU-LOST"]))
    ):
        (tmp_path / str(number)).mkdir()
        assert codes(serves(tmp_path / str(number), **{"node/kernel.log": kernel + more})) == expected
    # it may be why a server ended all the same
    (tmp_path / "ended").mkdir()
    found = look(tmp_path / "ended", crash(5), properties=FAILED, **{"node/kernel.log": kernel + RESET})
    assert codes(found) == ["DIAG-EXCEPTION", "DIAG-GPU-FAULT"]
    assert "(Xid 119 on 0000:a1:00, reset since)" in found.suspects[1].finding.message


def test_a_lost_card_behind_hundreds_of_lines_of_another(tmp_path: Path) -> None:
    kernel = "".join(XID.format("21", f"13, Graphics SM Warp Exception on (GPC {line})") for line in range(256))
    found = serves(tmp_path, **{"node/kernel.log": kernel + XID.format("a1", "62, 00000000 (GSP halt)")})
    assert codes(found) == ["DIAG-GPU-LOST"]
    assert [one.line for one in found.suspects[0].evidence] == [257]


def test_a_part_of_a_card_reports_too(tmp_path: Path) -> None:
    line = "[ 9.1] NVRM: Xid (PCI:0000:a1:00 GPU-I:05): 62, 00000000 (GSP halt)\n"
    assert codes(serves(tmp_path, **{"node/kernel.log": line})) == ["DIAG-GPU-LOST"]


@pytest.mark.parametrize(
    ("shown", "launch", "serving", "severity"),
    [
        (("01", "21"), "tp-size: 2\n", True, "warning"),
        (("01", "21"), "tp-size: 2\n", False, "warning"),
        (("01", "21"), "", True, "warning"),
        (("01", "21"), "", False, "error"),  # nobody knows how many it uses
        (("01", "21"), "tp-size: 3\n", False, "error"),  # the lost one may be the third
        (("01", "A1"), "tp-size: 2\n", True, "error"),
        ((), "tp-size: 2\n", True, "error"),
    ],
)
def test_whose_card_is_lost(tmp_path: Path, shown: tuple[str, ...], launch: str, serving: bool, severity: str) -> None:
    files = {
        "node/kernel.log": XID.format("a1", "119, Timeout after 45s"),
        "system/gpus.txt": "".join(card(name, 131072) for name in shown),
        "config/etc/sglang/launch.yaml": launch,
    }
    found = serves(tmp_path, **files) if serving else look(tmp_path, crash(5), properties=FAILED, **files)
    assert (found.suspects[0].finding.code, found.suspects[0].finding.severity) == ("DIAG-GPU-LOST", severity)
    if serving:
        assert found.verdict.state == (State.SERVING if severity == "warning" else State.BAD)


# --- what files about the machine tell

DEVICES = """/dev:
total 0
crw-rw-rw- 1 root root      1,   3 Nov 29 09:00 null
crw-rw-rw- 1 root root    195,   0 Nov 29 09:00 nvidia0
crw-rw-rw- 1 root root    195, 255 Nov 29 09:00 nvidiactl
crw-rw-rw- 1 root root    510,   0 Nov 29 09:00 nvidia-uvm

/dev/nvidia-caps:
total 0
cr-------- 1 root root    236,   1 Nov 29 09:00 nvidia-cap1
"""
MAJORS = "Character devices:\n  1 mem\n195 nvidia\n236 nvidia-caps\n510 nvidia-uvm\n\nBlock devices:\n  8 sd\n"


def test_device_nodes_as_they_should_be(tmp_path: Path) -> None:
    assert codes(serves(tmp_path, **{"system/devices.txt": DEVICES, "system/proc/devices": MAJORS})) == []


def test_a_major_that_has_moved_h02(tmp_path: Path) -> None:
    files = {"system/devices.txt": DEVICES, "system/proc/devices": MAJORS.replace("510 nvidia-uvm", "508 nvidia-uvm")}
    found = serves(tmp_path, **files)
    assert codes(found) == ["DIAG-DEVICES"]
    assert "/dev/nvidia-uvm has the major 510, the driver has 508" in found.suspects[0].finding.message
    assert [one.line for one in found.suspects[0].evidence] == [6]


def test_a_file_where_a_device_should_be_h05(tmp_path: Path) -> None:
    files = {"system/devices.txt": DEVICES.replace("crw-rw-rw- 1 root root    510,   0", "-rw-r--r-- 1 root root 0")}
    found = serves(tmp_path, **files)
    assert codes(found) == ["DIAG-DEVICES"]
    assert "/dev/nvidia-uvm is a regular file" in found.suspects[0].finding.message


def card(name: str, bar1: int, lanes: str = "16x") -> str:
    return f"""GPU 00000000:{name}:00.0
    Product Name                          : NVIDIA RTX PRO 6000 Blackwell Server Edition
    PCI
        GPU Link Info
            PCIe Generation
                Max                       : 5
                Current                   : 1
            Link Width
                Max                       : 16x
                Current                   : {lanes}
    FB Memory Usage
        Total                             : 97887 MiB
        Used                              : 0 MiB
    BAR1 Memory Usage
        Total                             : {bar1} MiB
        Used                              : 1 MiB
"""


def test_cards_as_they_should_be(tmp_path: Path) -> None:
    assert codes(serves(tmp_path, **{"system/gpus.txt": card("01", 131072) + card("21", 131072)})) == []


def test_a_small_window_into_the_cards_h11(tmp_path: Path) -> None:
    found = serves(tmp_path, **{"system/gpus.txt": card("01", 256) + card("21", 256)})
    assert (found.verdict.state, codes(found)) == (State.SERVING, ["DIAG-BAR1"])
    assert found.suspects[0].finding.message == "2 GPUs show 256 MiB of their 97887 MiB through BAR1"
    assert [one.line for one in found.suspects[0].evidence] == [15, 31]


def test_a_slot_with_few_lanes_h23(tmp_path: Path) -> None:
    found = serves(tmp_path, **{"system/gpus.txt": card("01", 131072) + card("21", 131072, "8x")})
    assert codes(found) == ["DIAG-PCIE-WIDTH"]
    assert "00000000:21:00.0 x8 of x16" in found.suspects[0].finding.message


def test_closed_modules_h09(tmp_path: Path) -> None:
    version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Mon Sep 1 2025\n"
    kernel = "[ 9.1] NVRM: GPU 0000:01:00.0: RmInitAdapter failed! (0x22:0x56:884)\n"
    found = serves(tmp_path, **{"system/proc/driver/nvidia/version": version, "system/kernel.log": kernel})
    assert codes(found) == ["DIAG-MODULES"]
    assert [one.file for one in found.suspects[0].evidence] == [
        "system/kernel.log",
        "system/proc/driver/nvidia/version",
    ]


def test_another_libcuda_comes_first_h21(tmp_path: Path) -> None:
    libraries = (
        "9 2026-11-29T09:00:00Z /usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05\n"
        "9 2026-11-29T09:00:00Z /usr/local/cuda-13.0/compat/libcuda.so.580.82.07\n"
    )
    files = {"system/libraries.txt": libraries, "system/proc/driver/nvidia/version": "Open Kernel Module 580.95.05 x\n"}
    assert codes(serves(tmp_path, **files)) == []
    (tmp_path / "b2").mkdir()
    found = failed(tmp_path / "b2", "RuntimeError: forward compatibility was attempted on non supported HW", **files)
    assert codes(found)[0] == "DIAG-DRIVER"
    assert "a compat directory of CUDA holds another libcuda" in found.suspects[0].finding.message


OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
REFUSED = "[ 9.1] NVRM: API mismatch: the client 570.133.20 (pid 1234) has the version 570.133.20, but this kernel module has the version 580.95.05.\n"
CUDA = "9 2026-11-29T09:00:00Z /usr/lib/x86_64-linux-gnu/libcuda.so.{0}\n"


@pytest.mark.parametrize(
    ("library", "serving", "expected"),
    [
        ("580.95.05", True, None),
        ("580.95.05", False, None),
        ("", True, ("warning", "has refused a program with other libraries since it booted")),
        ("", False, ("error", "libraries differ")),
        ("570.133.20", True, ("error", "differ: the module is 580.95.05, libcuda is 570.133.20")),
    ],
)
def test_a_program_that_the_driver_refused(
    tmp_path: Path, library: str, serving: bool, expected: tuple[str, str] | None
) -> None:
    files = {"node/kernel.log": REFUSED, "system/proc/driver/nvidia/version": OPEN}
    files["system/libraries.txt"] = CUDA.format(library) if library else ""
    found = serves(tmp_path, **files) if serving else look(tmp_path, crash(5), properties=FAILED, **files)
    told = [one.finding for one in found.suspects if one.finding.code == "DIAG-DRIVER"]
    assert [one.severity for one in told] == ([expected[0]] if expected else [])
    assert all(expected and one.message.endswith(expected[1]) for one in told)
    assert found.verdict.state == (
        State.CRASHED if not serving else State.BAD if library == "570.133.20" else State.SERVING
    )


def test_versions_that_are_equal_do_not_differ(tmp_path: Path) -> None:
    files = {"system/proc/driver/nvidia/version": OPEN, "system/libraries.txt": CUDA.format("580.95.05")}
    found = failed(tmp_path, "pynvml.NVMLError_LibRmVersionMismatch: Driver/library version mismatch", **files)
    assert found.suspects[0].finding.message == "the node's driver and the container's libraries differ"


def victim(group: str, pid: int) -> str:
    when = "2026-11-29T08:00:00.000000+0000 pve1 kernel: "
    return (
        f"{when}oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=ns,mems_allowed=0,oom_memcg={group},"
        f"task_memcg={group}/ns/system.slice/x.service,task=cc1plus,pid={pid},uid=100000\n"
        f"{when}Memory cgroup out of memory: Killed process {pid} (cc1plus) total-vm:1kB, anon-rss:1kB\n"
    )


@pytest.mark.parametrize(
    ("kernel", "container", "expected"),
    [
        (victim("/lxc/105", 77), "101", []),
        (victim("/qemu.slice/106.scope", 77), "101", []),
        (victim("/lxc/101", 77), "101", [1, 2]),
        (victim("/lxc/105", 77) + victim("/lxc/101", 78), "101", [3, 4]),
        (victim("/lxc/105", 77) + victim("/lxc/101", 77), "101", [3, 4]),  # a number that comes again
        (victim("/lxc/105", 77), "", [1, 2]),  # nobody knows which one is its own
    ],
)
def test_whose_memory_ran_out(tmp_path: Path, kernel: str, container: str, expected: list[int]) -> None:
    asked = {"name": "node/container.conf", "source": f"pct config {container}", "sha256": None}
    manifest = {"schema": 2, "host": "h", "unit": "sglang.service", "time": "", "files": [asked] if container else []}
    found = look(tmp_path, crash(5), properties=FAILED, **{"node/kernel.log": kernel, "manifest.json": manifest})
    told = [one for one in found.suspects if one.finding.code == "DIAG-HOST-MEMORY"]
    assert [one.line for each in told for one in each.evidence] == expected
    assert [one.finding.severity for one in told] == ["error"] * bool(expected)


@pytest.mark.parametrize(
    "files",
    [
        {"system/sys/fs/cgroup/memory.events": "low 0\noom 1\noom_kill 1\n"},
        {"node/kernel.log": victim("/lxc/101", 77)},
    ],
)
def test_memory_that_ran_out_once_does_not_make_a_server_bad(tmp_path: Path, files: dict[str, str]) -> None:
    found = serves(tmp_path, **files)
    assert (found.verdict.state, codes(found)) == (State.SERVING, ["DIAG-HOST-MEMORY"])
    assert found.suspects[0].finding.severity == "warning"
    (tmp_path / "failed").mkdir()
    found = look(tmp_path / "failed", crash(5), properties=FAILED, **files)
    assert found.suspects[0].finding.severity == "error"
    (tmp_path / "mute").mkdir()
    mute: dict[str, Any] = {**files, "answers.json": [{"path": "/health", "status": None, "seconds": 22.0}]}
    assert serves(tmp_path / "mute", **mute).suspects[0].finding.severity == "error"


def test_a_memory_limit_that_slows_a_load_h16(tmp_path: Path) -> None:
    log = unit(25, "Starting sglang.service - SGLang server (h)...") + at(26, "Load weight begin. avail mem=94.80 GB")
    events = {"system/sys/fs/cgroup/memory.events": "low 0\nhigh 48211\noom 0\noom_kill 0\n"}
    found = look(tmp_path, log, properties={**FAILED, "ActiveState": "activating"}, **events)
    assert codes(found) == ["DIAG-MEMORY-HIGH"]
    (tmp_path / "served").mkdir()
    assert (
        codes(serves(tmp_path / "served", **events)) == []
    )  # the weights' pages have met the limit once, and it serves


@pytest.mark.parametrize(
    ("line", "fires"),
    [
        ("tmpfs 65536K 65100K 436K 100% /dev/shm", True),
        ("tmpfs tmpfs 64M 64M 0 100% /dev/shm", True),
        ("tmpfs tmpfs 252G 1.2G 251G 1% /dev/shm", False),
    ],
)
def test_how_full_shared_memory_is_h12(tmp_path: Path, line: str, fires: bool) -> None:
    assert codes(serves(tmp_path, **{"system/df.txt": line + "\n"})) == (["DIAG-SHM-FULL"] if fires else [])


# --- processes and ranks


def test_a_scheduler_that_nobody_missed_o02(tmp_path: Path) -> None:
    found = serves(tmp_path, **{"processes.json": [SERVER, {**SCHEDULER, "state": "Z"}]})
    assert (found.verdict.state, codes(found)) == (State.BAD, ["DIAG-PROCESS-DEAD"])


def test_a_zombie_of_something_else(tmp_path: Path) -> None:
    zombie = {**SCHEDULER, "pid": 99, "name": "sh", "state": "Z"}
    assert codes(serves(tmp_path, **{"processes.json": [SERVER, SCHEDULER, zombie]})) == []


def test_a_detokenizer_that_is_the_victim_o03(tmp_path: Path) -> None:
    words = "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds."
    answers = [
        {"path": path, "status": None, "seconds": 22.0, "error": "timed out"} for path in ("/health", "/server_info")
    ]
    found = look(tmp_path, start() + decode(12) + at(20, words), **{"answers.json": answers})
    assert (found.verdict.state, codes(found)) == (State.HUNG, ["DIAG-MUTE"])
    assert found.suspects[0].finding.fix.startswith("py-spy dump")


PCIE = "Custom allreduce is disabled because it's not supported on more than two PCIe-only GPUs. To silence this warning, specify disable_custom_all_reduce=True explicitly."
LACKS = "CustomAllreduce is disabled because your platform lacks GPU P2P capability or P2P test failed. To silence"
WAITS = "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)"
KILLED = "Subprocess scheduler_2 (pid=12) crashed with exit code -9. Triggering SIGQUIT for cleanup..."


@pytest.mark.parametrize(
    ("said", "end", "expected"),
    [
        (PCIE, KILLED, ""),
        (PCIE, WAITS, ""),
        (LACKS, KILLED, ""),
        (LACKS, WAITS, "a rank made no step, and the GPUs have no peer access: the path between the GPUs is suspect"),
    ],
)
def test_custom_allreduce_that_is_not_used_is_ordinary(tmp_path: Path, said: str, end: str, expected: str) -> None:
    found = look(tmp_path, at(0, said, 30) + start() + at(0, said, 40) + decode(12) + at(13, end), properties=FAILED)
    told = [one.finding.message for one in found.suspects if one.finding.code == "DIAG-P2P"]
    assert [message.startswith(expected) for message in told] == [True] * bool(expected)


def test_p2p_off_for_nccl_alone_n03(tmp_path: Path) -> None:
    launch, environment = "tp-size: 8\n", {"NCCL_P2P_DISABLE": "1"}
    files: dict[str, Any] = {"config/etc/sglang/launch.yaml": launch, "process/environment.json": environment}
    assert codes(serves(tmp_path, **files)) == ["DIAG-P2P-HALF"]
    for number, more in enumerate(("disable-custom-all-reduce: true\n", "tp-size: 1\n")):
        (tmp_path / str(number)).mkdir()
        assert codes(serves(tmp_path / str(number), **{**files, "config/etc/sglang/launch.yaml": launch + more})) == []


def recorder(*states: tuple[int, str, str]) -> dict[str, Any]:
    names = ("collective_seq_id", "profiling_name", "state")
    return {
        "version": "2.9",
        "entries": [{**dict(zip(names, state, strict=True)), "process_group": ["0", "tp"]} for state in states],
    }


def test_ranks_that_went_different_ways_e20(tmp_path: Path) -> None:
    there = recorder((11, "nccl:all_reduce", "completed"), (12, "nccl:all_gather", "started"))
    late = recorder((11, "nccl:all_reduce", "completed"))
    other = recorder((11, "nccl:all_reduce", "completed"), (12, "nccl:all_reduce", "scheduled"))
    files = {f"flight/tmp/nccl_trace_rank_{rank}.json": there for rank in range(6)}
    found = look(
        tmp_path,
        start() + decode(12),
        **files,
        **{"flight/tmp/nccl_trace_rank_6.json": late, "flight/tmp/nccl_trace_rank_7.json": other},
    )
    (suspect,) = [one for one in found.suspects if one.finding.code == "DIAG-RANKS-DIVERGE"]
    assert suspect.finding.message.startswith("rank 6, 7 did not come")
    assert "nccl:all_reduce 11 is completed" in suspect.evidence[0].text


def test_ranks_that_wait_together_and_ranks_that_do_not_wait(tmp_path: Path) -> None:
    for number, states in enumerate(([(12, "nccl:all_gather", "started")], [(12, "nccl:all_gather", "completed")], [])):
        files = {f"flight/tmp/nccl_trace_rank_{rank}.json": recorder(*states) for rank in range(4)}
        (tmp_path / str(number)).mkdir()
        found = serves(tmp_path / str(number), **files)
        assert codes(found) == ([] if states else ["DIAG-FLIGHT-EMPTY"])  # O-12


def test_the_watchdog_of_a_first_start_o04(tmp_path: Path) -> None:
    log = start(ready=False) + at(12, "Scheduler watchdog timeout (self.watchdog_timeout=300)")
    found = look(tmp_path, log, properties={**FAILED, "ActiveState": "activating"})
    assert codes(found) == ["DIAG-WATCHDOG"]
    assert "raise watchdog-timeout" in found.suspects[0].finding.fix


def test_the_watchdog_of_a_log_whose_beginning_is_gone(tmp_path: Path) -> None:
    log = decode(9, count=4) + at(12, "Scheduler watchdog timeout (self.watchdog_timeout=300)")
    found = look(tmp_path, log, properties=FAILED)
    assert codes(found) == ["DIAG-WATCHDOG"]
    assert "raise watchdog-timeout" not in found.suspects[0].finding.fix


@pytest.mark.parametrize(
    ("environment", "line", "fires"),
    [
        ({"NCCL_DEBUG_FILE": "/var/log/nccl.%h.%p", "NCCL_DEBUG": "VERSION"}, "", True),
        ({"NCCL_DEBUG_FILE": "/var/log/nccl.%h.%p"}, "", True),
        ({"NCCL_DEBUG_FILE": "/var/log/nccl.%h.%p", "NCCL_DEBUG": "info"}, "", False),
        ({"NCCL_DEBUG_FILE": "/var/log/nccl./root.sglang", "NCCL_DEBUG": "INFO"}, "nccl.%h.%p", True),
        ({"NCCL_DEBUG_FILE": "/var/log/nccl.%h.%p", "NCCL_DEBUG": "INFO"}, "nccl.%%h.%%p", False),
        ({"NCCL_DEBUG": "VERSION"}, "", False),
    ],
)  # fmt: skip
def test_ncclss_own_file_n11_n12(tmp_path: Path, environment: dict[str, str], line: str, fires: bool) -> None:
    text = f'[Service]\nEnvironment="NCCL_DEBUG_FILE=/var/log/{line}"\n' if line else "[Service]\n"
    found = serves(tmp_path, **{"process/environment.json": environment, "unit.txt": text})
    assert (found.verdict.state, codes(found)) == (State.SERVING, ["DIAG-NCCL-SILENT"] if fires else [])


def test_ranks_that_disagree_about_host_memory_h14(tmp_path: Path) -> None:
    line = "h:1:2 [0] NCCL INFO cuMem host allocations do not work. Falling back to POSIX shared memory.\n"
    assert codes(look(tmp_path, crash(5), properties=FAILED, **{"nccl/h.1": line}))[0] == "DIAG-SHM-NAME"


@pytest.mark.parametrize(
    ("launch", "lengths", "fires"),
    [
        ("speculative-num-steps: 3\nspeculative-num-draft-tokens: 4\n", ["3.98", "4.00", "4.00", "3.97"], True),
        ("speculative-num-steps: 4\nspeculative-num-draft-tokens: 24\n", ["5.00"] * 4, True),
        ("speculative-num-steps: 5\nspeculative-num-draft-tokens: 6\n", ["4.00"] * 4, False),
        ("speculative-num-steps: 3\nspeculative-num-draft-tokens: 4\n", ["3.70", "4.00", "3.10", "4.00"], False),
        ("", ["3.00"] * 4, True),
        ("", ["2.50"] * 4, False),
    ],
)
def test_figures_that_are_too_good_e17(tmp_path: Path, launch: str, lengths: list[str], fires: bool) -> None:
    log = start() + "".join(decode(29, length) for length in lengths)
    found = look(tmp_path, log, **{"config/etc/sglang/launch.yaml": launch + "model-path: /m\n"})
    assert codes(found) == (["DIAG-ACCEPT-MAX"] if fires else [])


def test_evidence_never_leaves_the_bundle(tmp_path: Path) -> None:
    found = failed(tmp_path, "torch.OutOfMemoryError: CUDA out of memory.")
    assert str(tmp_path) not in json.dumps(found.as_dict())
