"""The probe's own files: what it writes, and what it leaves alone. Its hooks run in the scenario debug_probes."""

import json
import logging
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SOURCE = Path(__file__).parents[2] / "probe" / "src"


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(SOURCE))
    for name in ("PIVOT_PROBE_DIR", "PIVOT_PROBE_MAX_BYTES", "PIVOT_PROBE_ROWS"):
        monkeypatch.delenv(name, raising=False)
    import pivot_probe.record  # noqa: PLC0415 - importable only now

    return pivot_probe


def written(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in directory.glob("*.jsonl") for line in path.read_text().splitlines()]


def test_without_a_directory_nothing_is_recorded(probe: Any) -> None:
    assert probe.record.Settings.from_environment() is None
    probe.register()


def test_settings_from_the_environment(probe: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIVOT_PROBE_DIR", str(tmp_path))
    monkeypatch.setenv("PIVOT_PROBE_MAX_BYTES", "5000")
    assert probe.record.Settings.from_environment() == probe.record.Settings(tmp_path, 5000, 16)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("PIVOT_PROBE_DIR", "/nonexistent", "PIVOT_PROBE_DIR=/nonexistent is no directory"),
        ("PIVOT_PROBE_MAX_BYTES", "1GB", "PIVOT_PROBE_MAX_BYTES=1GB is no whole number above 0"),
        ("PIVOT_PROBE_ROWS", "0", "PIVOT_PROBE_ROWS=0 is no whole number above 0"),
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


def test_records_are_numbered_lines_in_a_file_named_after_the_process(probe: Any, tmp_path: Path) -> None:
    recorder = probe.record.Recorder(probe.record.Settings(tmp_path))
    assert recorder.write("target", rows=2) == 1
    assert recorder.write("fc", target=1) == 2
    first, second = written(tmp_path)
    assert (first["point"], first["n"], first["rows"]) == ("target", 1, 2)
    assert (second["point"], second["n"], second["target"]) == ("fc", 2, 1)
    assert recorder.path.name.endswith(f"-{os.getpid()}.jsonl")
    assert recorder.path.stat().st_mode & 0o007 == 0


def test_the_quota_ends_recording_with_a_reason_and_counts_other_files(probe: Any, tmp_path: Path) -> None:
    (tmp_path / "of-another-process.jsonl").write_text("x" * 3000 + "\n")
    recorder = probe.record.Recorder(probe.record.Settings(tmp_path, max_bytes=5000))
    numbers = [recorder.write("fc", prints="y" * 400) for _ in range(10)]
    assert 0 < numbers.index(0) < 10
    assert set(numbers[numbers.index(0) :]) == {0}
    lines = recorder.path.read_text().splitlines()
    assert json.loads(lines[-1])["point"] == "end"
    assert "PIVOT_PROBE_MAX_BYTES=5000" in json.loads(lines[-1])["reason"]
    assert sum(path.stat().st_size for path in tmp_path.glob("*.jsonl")) <= 5000


def test_a_volume_that_fills_up_ends_recording_and_nothing_else(
    probe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = probe.record.Recorder(probe.record.Settings(tmp_path))

    def full(_descriptor: int, _data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with caplog.at_level(logging.WARNING):
        assert recorder.write("fc") == 0
    assert recorder.ended == "writing failed: No space left on device"
    assert "serving goes on" in caplog.text


def test_a_partly_written_line_ends_recording_too(probe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = probe.record.Recorder(probe.record.Settings(tmp_path))
    monkeypatch.setattr(os, "write", lambda _descriptor, data: len(data) // 2)
    assert recorder.write("fc") == 0
    assert recorder.ended == "writing failed: the volume is full"


def test_failures_are_recorded_at_powers_of_two(probe: Any, tmp_path: Path) -> None:
    recorder = probe.record.Recorder(probe.record.Settings(tmp_path))
    for _ in range(9):
        recorder.failure("on_fc", ValueError("no"))
    records = written(tmp_path)
    assert [record["count"] for record in records] == [1, 2, 4, 8]
    assert {record["error"] for record in records} == {"ValueError: no"}
