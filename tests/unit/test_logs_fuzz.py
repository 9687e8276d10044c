"""Whatever a log holds, the readers go on, and the diagnosis of it ends with an answer."""

import io
import json
import os
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pivot.bundles.redact import Redactor
from pivot.logs import gpu_logs, server_log
from pivot.logs.diagnosis import diagnose, render
from pivot.logs.evidence import Facts, read

from . import test_logs_read as known
from .server_bundle import FINE, SCHEDULER, SERVER

SOAK = bool(os.environ.get("PIVOT_SOAK"))
DATA = Path(__file__).parent / "data/logs"
RECORDED = b"".join(path.read_bytes() for path in sorted(DATA.glob("*.log")))
LINES = [line for line in (RECORDED + known.B17.encode() + known.NCCL.encode()).split(b"\n") if line]
LINES += [
    parameters[0].encode() for mark in known.test_each_kind_of_line_is_known.pytestmark for parameters in mark.args[1]
]
LINES += [
    b"NVRM: Xid (PCI:0000:a1:00): 79, x",
    b"2026-11-29T10:00:00.000+0000 h systemd[1]: Starting sglang.service - x",
]
QUICK = settings(
    deadline=None,
    max_examples=60,
    derandomize=not SOAK,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@st.composite
def spoiled(draw: st.DrawFn) -> bytes:
    """Known lines, cut, glued, with bytes and numbers put in between, in any order."""
    pieces: list[bytes] = []
    for line in draw(st.lists(st.sampled_from(LINES), min_size=1, max_size=12)):
        at = draw(st.integers(0, len(line)))
        noise = draw(
            st.sampled_from([b"", b"\r", b"\x1b[31m", b"\0", b"9" * 40, b"\xff\xfe", b".", b"-1", b"\n"])
            | st.binary(max_size=8)
        )
        kept = line[: draw(st.integers(at, len(line)))]
        pieces += [
            draw(st.sampled_from([b"", b"2026-13-45T99:99:99.1+99:99 h x[1]: ", b"[99:99:99 TP9] "])),
            kept[:at],
            noise,
            kept[at:],
        ]
        pieces.append(draw(st.sampled_from([b"\n", b"\r\n", b"", b"\n\n"])))
    return b"".join(pieces)


class Dribble(io.RawIOBase):
    """A stream that gives little at a time, as a pipe may."""

    def __init__(self, raw: bytes, step: int) -> None:
        self._inner, self._step = io.BytesIO(raw), step

    def read(self, size: int = -1) -> bytes:
        return self._inner.read(self._step)


def summary(log: server_log.ServerLog) -> object:
    """What a log said, to be compared."""
    return (
        [
            (run.phases, run.loads, run.notes, run.errors, run.decode.lines, run.decode.total, run.ready, run.clean)
            for run in log.runs
        ],
        log.starts,
        log.gaps,
        log.lines,
    )


@QUICK
@given(st.binary(max_size=2000) | spoiled())
@example(b"[] [")
@example(b"Decode batch, #running-req: 0, #token: 1, accept len: 1e5,")
@example(b"Subprocess \x00 (pid=0) crashed with exit code 0")
@example(b"h:1:2 [3] NCCL INFO comm rank 1 nranks 99999999 Init COMPLETE")
def test_no_reader_stumbles_and_every_log_has_a_diagnosis(raw: bytes) -> None:
    log = server_log.ServerLog().read(io.BytesIO(raw))
    nccl, kernel = gpu_logs.NcclLog().read(io.BytesIO(raw)), gpu_logs.KernelLog().read(io.BytesIO(raw))
    facts = Facts(
        "x", "h", "sglang.service", 1764410400.0, log, server_log.ServerLog("before"), nccl=nccl, kernel=kernel
    )
    found = diagnose(facts)
    assert found.verdict.why
    assert render(found).isprintable() is False  # several lines
    assert all(line.isprintable() for line in render(found).splitlines())
    found.as_dict()


@QUICK
@given(spoiled(), st.integers(1, 40))
def test_how_a_log_comes_in_does_not_matter(raw: bytes, step: int) -> None:
    whole, slow = server_log.ServerLog(), server_log.ServerLog()
    whole.read(io.BytesIO(raw))
    slow.read(Dribble(raw, step))  # type: ignore[arg-type] - only read() is used
    assert summary(whole) == summary(slow)


@QUICK
@given(st.lists(st.sampled_from(LINES), max_size=30))
def test_windows_line_ends_say_the_same(lines: list[bytes]) -> None:
    unix, windows = server_log.ServerLog(), server_log.ServerLog()
    unix.read(io.BytesIO(b"".join(line + b"\n" for line in lines)))
    windows.read(io.BytesIO(b"".join(line + b"\r\n" for line in lines)))
    assert summary(unix) == summary(windows)


@QUICK
@given(st.text(max_size=300) | spoiled().map(lambda raw: raw.decode("utf-8", "replace")))
def test_masking_takes_any_text_and_masks_once(text: str) -> None:
    redactor = Redactor(["made-up-known-secret"], prompts=False)
    masked = redactor.text(text)
    assert Redactor(["made-up-known-secret"], prompts=False).text(masked) == masked
    assert "made-up-known-secret" not in masked


# what a bundle's files hold, whole or spoiled
FILES = {
    "server.log": known.B17,
    "unit-properties.txt": "ActiveState=active\nNRestarts=99999999999\n",
    "unit.txt": "Environment=NCCL_DEBUG_FILE=/x/%h.%p\n",
    "processes.json": json.dumps([SERVER, SCHEDULER, None, {"pid": "x", "state": 3}]),
    "answers.json": json.dumps([*FINE, {"path": 3, "status": "x"}]),
    "process/environment.json": '{"NCCL_DEBUG_FILE": "/x", "NCCL_P2P_DISABLE": "1"}',
    "process/cmdline.json": '["python", "--tp-size", "8", "--x"]',
    "config/etc/sglang/launch.yaml": "speculative-num-steps: 9999999\n",
    "nccl/h.1": known.NCCL,
    "flight/tmp/nccl_trace_rank_3.json": '{"entries": [{"collective_seq_id": 3, "state": "started"}, 4]}',
    "node/kernel.log": "NVRM: Xid (PCI:0000:a1:00): 79, x\n",
    "system/df.txt": "tmpfs tmpfs 64M 64M 0 100% /dev/shm\n",
    "system/devices.txt": "/dev:\ncrw-rw-rw- 1 root root 510,   0 Nov 29 09:00 nvidia-uvm\n",
    "system/proc/devices": "508 nvidia-uvm\n",
    "system/gpus.txt": "GPU 00000000:01:00.0\n    BAR1 Memory Usage\n        Total    : 256 MiB\n",
    "system/gpu-processes.txt": "4711, python, 5 MiB\n",
    "system/listing.txt": "9 2026-11-29T09:00:00Z /dev/shm/nccl-x\n",
    "system/libraries.txt": "9 2026-11-29T09:00:00Z /usr/lib/libcuda.so.580.95.05\n",
    "system/proc/driver/nvidia/version": "Kernel Module 580.95.06\n",
    "system/memory.events": "high 9\noom_kill 99999999999999999999\n",
}


@QUICK
@given(st.data())
def test_every_bundle_has_a_diagnosis(data: st.DataObject) -> None:
    manifest = {"schema": 2, "host": "h", "unit": "sglang.service", "time": "2026-11-29T103000Z", "files": [3, {}]}
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "manifest.json").write_text(json.dumps(manifest))
        for name in data.draw(st.lists(st.sampled_from(sorted(FILES)), unique=True)):
            raw = FILES[name].encode()
            at = data.draw(st.integers(0, len(raw)))
            path = Path(directory) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(raw[:at] + data.draw(st.binary(max_size=9)) + raw[data.draw(st.integers(0, len(raw))) :])
        found = diagnose(read(Path(directory)))
    assert all(line.isprintable() for line in render(found).splitlines())
    assert found.verdict.why
    json.dumps(found.as_dict())
