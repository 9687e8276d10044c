"""States of a server that crashed or was stopped, and its causes, each from a bundle made by hand."""

# ruff: noqa: E501 - lines as they are logged

from pathlib import Path

import pytest

from pivot.logs.diagnosis import State

from .server_bundle import FAILED, RUNNING, at, codes, crash, decode, look, start, unit


def test_crashed_says_why(tmp_path: Path) -> None:
    found = look(tmp_path, crash(5), properties=FAILED, **{"processes.json": [], "answers.json": []})
    assert (found.verdict.state, codes(found)) == (State.CRASHED, ["DIAG-EXCEPTION"])
    assert found.verdict.why == "RuntimeError: captured 2 of 3 aux hidden states"


REQUEST = (
    at(12, "ERROR:    Exception in ASGI application").replace("[2026-11-29 10:12:00] ", "")
    + "2026-11-29T10:12:00.000000+0000 h sglang[11]: Traceback (most recent call last):\n"
    + "2026-11-29T10:12:00.000000+0000 h sglang[11]: KeyError: 'role'\n"
    + "2026-11-29T10:12:00.000000+0000 h sglang[11]: jinja2.exceptions.TemplateError: roles must alternate\n"
)
HIT = at(13, "Scheduler hit an exception: Traceback (most recent call last):")
RAISED = "2026-11-29T10:13:00.000000+0000 h sglang[11]: IndexError: index 163840 is out of bounds\n"
DIED = at(13, "Subprocess scheduler_2 (pid=12) crashed with exit code -9. Triggering SIGQUIT for cleanup...", 1)
PEER = "2026-11-29T10:13:00.000000+0000 h sglang[11]: torch.distributed.DistBackendError: Connection closed by peer\n"
EARLIER = "2026-11-29T10:00:30.000000+0000 h sglang[11]: ImportError: an optional package is missing\n"


@pytest.mark.parametrize(
    ("log", "why"),
    [
        (start() + decode(11) + REQUEST + HIT + RAISED + DIED, "IndexError: index 163840 is out of bounds"),
        (start() + decode(11) + REQUEST * 14 + HIT + RAISED + DIED, "IndexError: index 163840 is out of bounds"),
        (start() + decode(11) + HIT + RAISED * 30 + DIED, "IndexError: index 163840 is out of bounds"),
        (EARLIER + start(ready=False) + HIT + RAISED + DIED, "IndexError: index 163840 is out of bounds"),
        # of a start the first one counts, whichever rank says that it hit one
        (start(ready=False) + RAISED + HIT + PEER + DIED, "IndexError: index 163840 is out of bounds"),
        # requests that fail because of it do not push it out
        (start() + decode(11) + RAISED + REQUEST * 14 + DIED, "IndexError: index 163840 is out of bounds"),
        (start() + decode(11) + REQUEST + DIED, "a scheduler died (scheduler_2 -9)"),
        (start() + decode(11) + REQUEST * 14 + DIED, "a scheduler died (scheduler_2 -9)"),
        (start() + decode(11) + REQUEST + decode(12) + RAISED + DIED, "IndexError: index 163840 is out of bounds"),
        (
            start() + decode(11) + REQUEST + at(12, "Timeout") + RAISED + DIED,
            "IndexError: index 163840 is out of bounds",
        ),
        (
            start(ready=False) + EARLIER + at(10, "The server is fired up and ready to roll!") + DIED,
            "a scheduler died (scheduler_2 -9)",
        ),
    ],
)
def test_an_error_that_a_server_outlived_is_no_cause(tmp_path: Path, log: str, why: str) -> None:
    found = look(tmp_path, log, properties=FAILED, **{"processes.json": [], "answers.json": []})
    assert (found.verdict.state, found.verdict.why) == (State.CRASHED, why)
    assert ("DIAG-EXCEPTION" in codes(found)) == why.startswith("IndexError")


def test_killed_during_a_load(tmp_path: Path) -> None:
    log = start(ready=False) + at(
        7, "Subprocess scheduler_0 (pid=12) crashed with exit code -9. Triggering SIGQUIT for cleanup..."
    )
    log += unit(7, "sglang.service: Main process exited, code=killed, status=9/KILL", 5)
    found = look(tmp_path, log, properties=FAILED, **{"processes.json": []})
    assert (found.verdict.state, codes(found)) == (State.CRASHED, ["DIAG-KILLED"])
    assert found.suspects[0].finding.message.startswith("scheduler_0 was killed by signal 9")


def test_the_main_process_killed_by_somebody(tmp_path: Path) -> None:
    log = start(ready=False) + unit(7, "sglang.service: Main process exited, code=killed, status=9/KILL", 5)
    found = look(tmp_path, log, properties=FAILED)
    assert (found.verdict.state, codes(found)) == (State.CRASHED, ["DIAG-KILLED"])


def test_a_loop_that_systemd_ended(tmp_path: Path) -> None:
    log = (
        crash(1, counter=1)
        + crash(2, counter=2)
        + crash(3, counter=3)
        + unit(4, "sglang.service: Start request repeated too quickly.")
    )
    found = look(tmp_path, log, properties={**FAILED, "NRestarts": "3"})
    assert (found.verdict.state, codes(found)) == (State.LOOPING, ["DIAG-EXCEPTION"])
    assert (
        found.verdict.why
        == "3 starts failed, systemd has given up; the last: RuntimeError: captured 2 of 3 aux hidden states"
    )


def test_a_loop_that_goes_on_while_the_bundle_is_taken(tmp_path: Path) -> None:
    log = crash(1, counter=1) + crash(2, counter=2) + unit(3, "Starting sglang.service - SGLang server (h)...")
    found = look(tmp_path, log, properties={**RUNNING, "ActiveState": "activating", "NRestarts": "2"})
    assert found.verdict.state == State.LOOPING


def test_failed_starts_of_people_are_no_loop(tmp_path: Path) -> None:
    found = look(tmp_path, crash(1) + crash(2) + crash(3), properties=FAILED)
    assert (found.verdict.state, codes(found)) == (State.CRASHED, ["DIAG-EXCEPTION"])


def test_one_restart_that_worked_is_no_loop(tmp_path: Path) -> None:
    found = look(
        tmp_path, crash(1, counter=1) + start(2) + decode(29, count=3), properties={**RUNNING, "NRestarts": "1"}
    )
    assert (found.verdict.state, codes(found)) == (State.SERVING, [])


def test_a_server_that_was_stopped(tmp_path: Path) -> None:
    log = start() + unit(20, "Stopping sglang.service - SGLang server (h)...") + at(20, "SIGTERM received. signum=None")
    log += unit(21, "sglang.service: Deactivated successfully.")
    found = look(tmp_path, log, properties={**RUNNING, "ActiveState": "inactive", "SubState": "dead"})
    assert (found.verdict.state, codes(found)) == (State.STOPPED, [])


def test_no_unit_and_no_log(tmp_path: Path) -> None:
    found = look(tmp_path, "", properties={"LoadState": "not-found", "ActiveState": "inactive"})
    assert (found.verdict.state, found.verdict.why) == (State.UNKNOWN, "there is no unit sglang.service on this host")


# --- suspects that more than a log shows


def test_b15_shared_memory_is_full(tmp_path: Path) -> None:
    warn = "llm01:2200:2300 [3] NCCL WARN Error: failed to extend /dev/shm/nccl-Ab12Cd to 9637892 bytes, error: No space left on device (28)\n"
    listing = "9637892 2026-11-28T08:00:00Z /dev/shm/nccl-old\n9637892 2026-11-29T10:05:00Z /dev/shm/nccl-new\n"
    df = "Filesystem Type Size Used Avail Use% Mounted on\ntmpfs tmpfs 65536K 65100K 436K 100% /dev/shm\n"
    found = look(
        tmp_path, crash(5), properties=FAILED, **{"nccl/h.3": warn, "system/df.txt": df, "system/listing.txt": listing}
    )
    assert codes(found) == ["DIAG-SHM-FULL", "DIAG-EXCEPTION"]
    assert "1 segments there are older" in found.suspects[0].finding.message
    assert [line.file for line in found.suspects[0].evidence] == ["nccl/h.3", "system/df.txt", "system/listing.txt"]
    assert "size, not NCCL flags" in found.suspects[0].finding.fix


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (
            "NCCL WARN Error while attaching to shared memory segment /dev/shm/nccl-\x1a\x7f (size 0), error: No such file (2)",
            "DIAG-SHM-NAME",
        ),
        ("NCCL WARN Call to shm_open failed: Permission denied", "DIAG-SHM-DENIED"),
        ("NCCL WARN Cuda failure 'API mismatch'", "DIAG-DRIVER"),
    ],
)
def test_what_nccl_warns_of(tmp_path: Path, text: str, code: str) -> None:
    found = look(tmp_path, crash(5), properties=FAILED, **{"nccl/h.3": f"h:1:2 [0] {text}\n"})
    assert codes(found)[0] == code


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("OSError: [Errno 28] No space left on device", "DIAG-VOLUME-FULL"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "DIAG-GPU-MEMORY"),
        (
            "ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes.",
            "DIAG-LEFTOVERS",
        ),
        ("OSError: [Errno 98] Address already in use", "DIAG-PORT"),
        ("ImportError: /c/.cache/flashinfer/x.so: undefined symbol: _ZN3c10", "DIAG-JIT-CACHE"),
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "DIAG-ARCHITECTURE"),
        ("RuntimeError: Failed to initialize NVML: Driver/library version mismatch", "DIAG-DRIVER"),
        ("std::bad_alloc", "DIAG-HOST-MEMORY"),
    ],
)
def test_causes_stand_before_the_exception(tmp_path: Path, text: str, code: str) -> None:
    found = look(tmp_path, crash(5).replace("RuntimeError: captured 2 of 3 aux hidden states", text), properties=FAILED)
    assert codes(found)[0] == code
    assert found.verdict.state == State.CRASHED


def test_a_full_volume_that_nobody_has_met_yet(tmp_path: Path) -> None:
    df = "Filesystem Type Size Used Avail Use% Mounted on\n/dev/sda ext4 9G 9G 0 100% /var/log\n/dev/sdb ext4 9G 9G 0 100% /models\n"
    found = look(tmp_path, start() + decode(29, count=3), **{"system/df.txt": df})
    assert codes(found) == ["DIAG-VOLUME-FULL"]
    assert [line.line for line in found.suspects[0].evidence] == [2]


def test_a_full_volume_that_stops_even_what_comes_before_the_server(tmp_path: Path) -> None:
    log = (
        unit(5, "Starting sglang.service - SGLang server (h)...")
        + "2026-11-29T10:05:01.000000+0000 h sglang[9]: Traceback (most recent call last):\n"
        + "2026-11-29T10:05:01.000000+0000 h sglang[9]: OSError: [Errno 28] No space left on device: '/run/sglang/started.json.new'\n"
        + unit(5, "sglang.service: Control process exited, code=exited, status=1/FAILURE", 1)
        + unit(5, "sglang.service: Failed with result 'exit-code'.", 2)
        + unit(5, "Failed to start sglang.service - SGLang server (h).", 2)
    )
    df = "Filesystem Type Size Used Avail Use% Mounted on\nfull tmpfs 4.0K 4.0K 0 100% /run/sglang\n"
    found = look(tmp_path, log, properties={**FAILED, "Result": "exit-code"}, **{"system/df.txt": df})
    assert (found.verdict.state, codes(found)) == (State.CRASHED, ["DIAG-VOLUME-FULL", "DIAG-EXCEPTION"])
    assert [line.file for line in found.suspects[0].evidence] == ["server.log", "system/df.txt"]


def test_gpus_that_need_a_reset_b13(tmp_path: Path) -> None:
    kernel = "[ 812.1] NVRM: Xid (PCI:0000:a1:00): 62, 0 (GSP halt)\n[ 9.0] NVRM: Xid (PCI:0000:21:00): 94, x\n[ 9.0] NVRM: Xid (PCI:0000:22:00): 31, x\n"
    found = look(tmp_path, crash(5), properties=FAILED, **{"system/kernel.log": kernel})
    assert codes(found) == ["DIAG-GPU-LOST", "DIAG-GPU-ECC", "DIAG-EXCEPTION", "DIAG-GPU-FAULT"]
    assert "0000:a1:00" in found.suspects[0].finding.message
    assert "power the node fully off" in found.suspects[0].finding.fix


def test_a_driver_that_moved_b11(tmp_path: Path) -> None:
    module = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
    libraries = "libcuda.so.1 -> libcuda.so.580.105.08\n"
    found = look(
        tmp_path,
        crash(5),
        properties=FAILED,
        **{"system/proc/driver/nvidia/version": module, "system/libraries.txt": libraries},
    )
    assert codes(found)[0] == "DIAG-DRIVER"
    assert "the module is 580.95.05, libcuda is 580.105.08" in found.suspects[0].finding.message


def test_somebody_else_on_the_gpus(tmp_path: Path) -> None:
    rows = "pid, process_name, used_gpu_memory\n12, sglang::scheduler, 90000 MiB\n4711, python3, 60000 MiB\n"
    found = look(tmp_path, start() + decode(29, count=3), **{"system/gpu-processes.txt": rows})
    assert codes(found) == ["DIAG-LEFTOVERS"]
    assert "python3 (4711)" in found.suspects[0].finding.message


def test_memory_of_the_host_by_its_cgroup(tmp_path: Path) -> None:
    events = {"system/sys/fs/cgroup/memory.events": "low 0\nhigh 7\noom 1\noom_kill 1\n"}
    assert codes(look(tmp_path, start() + decode(29, count=3), **events)) == ["DIAG-HOST-MEMORY"]


def test_a_start_that_systemd_did_not_wait_for(tmp_path: Path) -> None:
    log = start(ready=False) + unit(9, "sglang.service: start-post operation timed out. Terminating.")
    log += unit(9, "sglang.service: Failed with result 'timeout'.", 2)
    found = look(tmp_path, log, properties={**FAILED, "Result": "timeout"})
    assert (found.verdict.state, codes(found)) == (State.CRASHED, ["DIAG-START-TIMEOUT"])


def test_gaps_of_a_rate_limited_journal_o11(tmp_path: Path) -> None:
    gap = "2026-11-29T10:12:00.000000+0000 h systemd-journald[88]: Suppressed 4711 messages from sglang.service\n"
    found = look(tmp_path, start() + gap + decode(29, count=3))
    assert (found.verdict.state, codes(found)) == (State.SERVING, ["DIAG-LOG-GAP"])


def test_health_beside_a_server_info_that_never_comes(tmp_path: Path) -> None:
    answers = [
        {"path": "/health", "status": 200, "seconds": 0.1},
        {"path": "/server_info", "status": None, "seconds": 25.0, "error": "timed out"},
    ]
    found = look(tmp_path, start() + decode(29, count=3), **{"answers.json": answers})
    assert codes(found) == ["DIAG-HEALTH-LIES"]
