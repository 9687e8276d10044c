"""The probe's own files: what it writes, and what it leaves alone. Its hooks run on a real server elsewhere."""

import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pivot.engines import engine_models
from pivot.experiments.probe import payload

SOURCE = Path(__file__).parents[2] / "probe" / "src"
VARIABLES = ("DIR", "MAX_BYTES", "ROWS", "TENSOR_BYTES", "UNTIL")


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(SOURCE))
    for name in VARIABLES:
        monkeypatch.delenv(f"PIVOT_PROBE_{name}", raising=False)
    import pivot_probe.guard  # noqa: PLC0415 - importable only now
    import pivot_probe.journal  # noqa: PLC0415 - importable only now
    import pivot_probe.record  # noqa: PLC0415 - importable only now
    import pivot_probe.settings  # noqa: PLC0415 - importable only now

    return pivot_probe


@pytest.fixture
def record(probe: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Recorders with the given settings, closed afterwards."""
    made: list[Any] = []

    def make(**settings: Any) -> Any:
        made.append(probe.record.Recorder(probe.settings.Settings(tmp_path, **settings)))
        return made[-1]

    yield make
    for recorder in made:
        recorder.close()


def written(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in directory.glob("*.jsonl") for line in path.read_text().splitlines()]


# --- settings


def test_without_a_directory_nothing_is_recorded(probe: Any) -> None:
    assert probe.settings.Settings.from_environment() is None
    probe.register()


def test_settings_from_the_environment(probe: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in zip(VARIABLES, (str(tmp_path), "5000", "4", "0", "2026-11-29T20:00:00Z"), strict=True):
        monkeypatch.setenv(f"PIVOT_PROBE_{name}", value)
    found = probe.settings.Settings.from_environment()
    assert (found.directory, found.max_bytes, found.tensor_bytes, found.rows) == (tmp_path, 5000, 0, 4)
    assert found.until == 1795982400.0  # date -d 2026-11-29T20:00:00Z +%s
    assert found.until_text == "2026-11-29T20:00:00Z"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("PIVOT_PROBE_DIR", "/nonexistent", "PIVOT_PROBE_DIR=/nonexistent is no directory"),
        ("PIVOT_PROBE_MAX_BYTES", "1GB", "PIVOT_PROBE_MAX_BYTES=1GB is no whole number of at least 1"),
        ("PIVOT_PROBE_ROWS", "0", "PIVOT_PROBE_ROWS=0 is no whole number of at least 1"),
        ("PIVOT_PROBE_TENSOR_BYTES", "-1", "PIVOT_PROBE_TENSOR_BYTES=-1 is no whole number of at least 0"),
        ("PIVOT_PROBE_UNTIL", "tomorrow", "PIVOT_PROBE_UNTIL=tomorrow is no UTC time such as 2026-11-29T20:00:00Z"),
    ],
)
def test_bad_settings_are_one_sentence_in_the_log(
    probe: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    value: str,
    said: str,
) -> None:
    monkeypatch.setenv("PIVOT_PROBE_DIR", str(tmp_path))
    monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING):
        probe.register()
    assert said in caplog.text
    assert written(tmp_path) == []


def test_the_launcher_is_left_alone(probe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Spec:
        name = "sglang.launch_server"

    monkeypatch.setattr("__main__.__spec__", Spec())
    assert probe._is_launcher()
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    assert not probe._is_launcher()
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: None)
    monkeypatch.setattr("__main__.__spec__", None)
    assert not probe._is_launcher()


# --- records


def test_records_are_numbered_lines_in_a_file_named_after_the_process(record: Any, tmp_path: Path) -> None:
    recorder = record()
    assert recorder.write("target", rows=2) == 1
    assert recorder.write("fc", lambda number: {"late": number}, target=1) == 2
    recorder.flush()
    first, second = written(tmp_path)
    assert (first["point"], first["n"], first["rows"]) == ("target", 1, 2)
    assert (second["point"], second["n"], second["target"], second["late"]) == ("fc", 2, 1, 2)
    assert recorder.path.name.endswith(f"-{os.getpid()}.jsonl")
    assert recorder.path.stat().st_mode & 0o007 == 0


def test_who_observes_never_waits_and_what_the_writer_cannot_take_is_counted(
    probe: Any, record: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe.record, "WAITING", 5)
    recorder, held, released = record(), threading.Event(), []

    def slow(_number: int) -> dict[str, Any]:
        released.append(held.wait(10))
        return {}

    recorder.write("first", slow)
    while not recorder._queue.empty():  # the writer has taken it and hangs in it
        time.sleep(0.01)
    numbers = [recorder.write("fc", row=row) for row in range(20)]
    assert not released  # the writer hangs in it still
    assert numbers == list(range(2, 22))  # each has its number, written or not
    held.set()
    recorder.flush()
    assert recorder.write("fc", row=20) == 23  # 22 says how many were lost
    recorder.flush()
    found = written(tmp_path)
    assert [entry["n"] for entry in found] == [1, 2, 3, 4, 5, 6, 22, 23]
    assert (found[-2]["point"], found[-2]["count"]) == ("dropped", 15)
    assert [entry["row"] for entry in found if entry["point"] == "fc"] == [0, 1, 2, 3, 4, 20]


def test_numbers_rise_from_line_to_line_whoever_writes(record: Any, tmp_path: Path) -> None:
    recorder = record()

    def work() -> None:
        for _ in range(50):
            recorder.write("fc")

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    recorder.flush()
    assert [entry["n"] for entry in written(tmp_path)] == list(range(1, 201))


def test_a_killed_process_loses_nothing_that_was_written_before(tmp_path: Path) -> None:
    program = (
        "import os, sys, time; from pathlib import Path; from pivot_probe.record import Recorder; "
        "from pivot_probe.settings import Settings; recorder = Recorder(Settings(Path(sys.argv[1]))); "
        "recorder.write('first'); time.sleep(0.01); recorder.write('second'); print('written', flush=True); "
        "time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        deadline = time.monotonic() + 10
        while len(written(tmp_path)) < 2:
            assert time.monotonic() < deadline, "the writer does not write by itself"
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM
    assert [entry["point"] for entry in written(tmp_path)] == ["first", "second"]


def test_a_process_that_ends_writes_what_still_waits(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from pivot_probe.record import Recorder; "
        "from pivot_probe import record; record.FAREWELL = 60.0; "
        "from pivot_probe.settings import Settings; recorder = Recorder(Settings(Path(sys.argv[1]))); "
        "[recorder.write('fc') for _ in range(300)]"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=environment, check=True, timeout=30)
    assert [entry["n"] for entry in written(tmp_path)] == list(range(1, 301))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")  # forking beside the writer is the point
def test_a_forked_child_records_nothing_into_its_parents_file(record: Any, tmp_path: Path) -> None:
    recorder = record()
    recorder.write("parent")
    recorder.flush()
    child = os.fork()
    if child == 0:
        os._exit(3 if recorder.write("child") == 0 else 4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert recorder.write("parent") == 2
    recorder.flush()
    assert [entry["point"] for entry in written(tmp_path)] == ["parent", "parent"]


# --- the end of a recording


def test_the_quota_ends_recording_with_a_reason_and_counts_other_files(record: Any, tmp_path: Path) -> None:
    recorder = record(max_bytes=5000)
    (tmp_path / "of-another-process.jsonl").write_text("x" * 3000 + "\n")
    for _ in range(10):
        recorder.write("fc", prints="y" * 400)
    recorder.flush()
    assert recorder.write("fc") == 0
    lines = [json.loads(line) for line in recorder.path.read_text().splitlines()]
    assert 2 < len(lines) < 10
    assert lines[-1]["point"] == "end"
    assert "PIVOT_PROBE_MAX_BYTES=5000" in lines[-1]["reason"]
    assert [line["n"] for line in lines] == sorted(line["n"] for line in lines)
    assert sum(path.stat().st_size for path in tmp_path.glob("*.jsonl")) <= 5000


def test_a_volume_that_fills_up_ends_recording_and_nothing_else(
    record: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = record()

    def full(_descriptor: int, _data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with caplog.at_level(logging.WARNING):
        recorder.write("fc")
        recorder.flush()
    assert recorder.ended == "writing failed: No space left on device"
    assert recorder.write("fc") == 0
    assert "serving goes on" in caplog.text


def test_a_partly_written_line_ends_recording_too(record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = record()
    monkeypatch.setattr(os, "write", lambda _descriptor, data: len(data) // 2)
    recorder.write("fc")
    recorder.flush()
    assert recorder.ended == "writing failed: the volume is full"


def test_recording_ends_by_itself_at_the_time_that_was_set(
    probe: Any, record: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe.record, "PATIENCE", 0.02)
    now, until = [time.time()], time.time() + 60
    clock = SimpleNamespace(time=lambda: now[0], sleep=time.sleep, strftime=time.strftime, gmtime=time.gmtime)
    monkeypatch.setattr(probe.record, "time", clock)
    recorder = record(until=until)
    assert recorder.write("before") == 1
    recorder.flush()
    now[0] = until
    recorder._thread.join(30)
    assert recorder.write("after") == 0
    first, last = written(tmp_path)
    assert (first["point"], last["point"], last["n"]) == ("before", "end", 2)
    assert last["reason"] == f"PIVOT_PROBE_UNTIL={recorder.settings.until_text} has come"


def test_a_time_that_is_past_records_nothing(record: Any, tmp_path: Path) -> None:
    recorder = record(until=time.time() - 1)
    assert recorder.write("fc") == 0
    recorder._thread.join(30)
    assert [entry["point"] for entry in written(tmp_path)] == ["end"]


# --- failures


class Watcher:
    """Something with hooks, one of which is planted to raise."""

    def __init__(self, probe: Any, recorder: Any) -> None:
        self.recorder = recorder
        self.seen: list[object] = []
        self.good = probe.guard.guarded(Watcher._good).__get__(self)
        self.bad = probe.guard.guarded(Watcher._bad).__get__(self)

    def _good(self, value: object) -> None:
        self.seen.append(value)

    def _bad(self, value: object) -> None:
        self.seen.append(value)
        raise ValueError("planted")


def test_a_hook_that_raises_is_counted_and_recorded_and_raises_nothing(probe: Any, record: Any, tmp_path: Path) -> None:
    watcher = Watcher(probe, record())
    results = [hook(turn) for turn in range(9) for hook in (watcher.bad, watcher.good)]
    watcher.recorder.flush()
    assert results == [None] * 18  # SGLang takes None as: leave arguments and result as they are
    assert len(watcher.seen) == 18  # the other hook goes on, and the failing one is tried again
    records = written(tmp_path)
    assert [entry["point"] for entry in records] == ["failure"] * 4
    assert [entry["count"] for entry in records] == [1, 2, 4, 8]
    assert {(entry["hook"], entry["error"]) for entry in records} == {("_bad", "ValueError: planted")}


def test_hooks_do_nothing_once_recording_has_ended(probe: Any, record: Any) -> None:
    watcher = Watcher(probe, record())
    watcher.recorder.ended = "for a test"
    watcher.bad(1)
    watcher.good(2)
    assert watcher.seen == []


def test_late_fields_that_cannot_be_had_are_a_failure_too(record: Any, tmp_path: Path) -> None:
    recorder = record()

    def lost(_number: int) -> dict[str, Any]:
        raise RuntimeError("the device is gone")

    recorder.write("fc", lost)
    recorder.write("fc")
    recorder.flush()
    recorder.flush()  # the failure was taken while the first was written
    first, second = sorted(written(tmp_path), key=lambda entry: str(entry["point"]))
    assert (first["point"], first["hook"]) == ("failure", "late fields of fc")
    assert first["error"] == "RuntimeError: the device is gone"
    assert second["point"] == "fc"


# --- what is hooked


def test_every_hook_target_is_one_that_engine_descriptions_look_for(probe: Any) -> None:
    from pivot_probe import targets  # noqa: PLC0415 - importable only now

    assert set(engine_models.HOOKS) == {targets.FRAMEWORK, *targets.HOOKED}
    assert probe.__version__ in (SOURCE.parent / "pyproject.toml").read_text()


def test_targets_that_an_engine_lacks_are_named(probe: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from pivot_probe import targets  # noqa: PLC0415 - importable only now

    monkeypatch.setattr(targets, "HOOKED", ("json.dumps", "json.nothing", "nowhere.Class.method"))
    assert targets.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["found", "json.dumps"]
    assert [line.split()[0] for line in lines] == ["missing:", "found", "missing:", "missing:"]


def test_what_the_tests_of_the_probe_serve_is_what_the_role_puts_on_a_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SOURCE.parent))
    import beside  # noqa: PLC0415 - importable only now

    beside.install(tmp_path)
    files = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    expected = payload(SOURCE.parent)
    assert files.keys() == expected.keys()
    assert all(files[name] == expected[name] for name in files if not name.endswith("METADATA"))
