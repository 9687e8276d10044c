"""Bundles of a server as a test writes them: what its journal says, line by line, and the files beside it."""

# ruff: noqa: E501 - lines as they are logged

import json
from pathlib import Path
from typing import Any

from pivot.logs import diagnosis
from pivot.logs.diagnosis import Diagnosis
from pivot.logs.evidence import read

RUNNING = {"ActiveState": "active", "SubState": "running", "Result": "success", "LoadState": "loaded", "NRestarts": "0"}
FAILED = {**RUNNING, "ActiveState": "failed", "SubState": "failed", "Result": "signal"}
SCHEDULER = {"pid": 12, "name": "sglang::schedul", "state": "S", "busy": 0.4, "seconds": 9.0, "waits_in": "0"}
SERVER = {"pid": 11, "name": "python3", "state": "S", "busy": 0.0, "seconds": 3.0, "waits_in": "0"}
FINE = [{"path": path, "status": 200, "seconds": 0.1} for path in ("/health", "/server_info", "/metrics")]


def at(minute: int, text: str, second: int = 0) -> str:
    return f"2026-11-29T10:{minute:02d}:{second:02d}.000000+0000 h sglang[11]: [2026-11-29 10:{minute:02d}:{second:02d}] {text}\n"


def unit(minute: int, text: str, second: int = 0) -> str:
    return f"2026-11-29T10:{minute:02d}:{second:02d}.000000+0000 h systemd[1]: {text}\n"


def start(minute: int = 0, *, ready: bool = True) -> str:
    """A start of ten minutes, as the journal has it."""
    lines = [
        unit(minute, "Starting sglang.service - SGLang server (h)..."),
        at(minute, "server_args=ServerArgs(model_path='/models/t')", 20),
        at(minute + 1, "Load weight begin. avail mem=94.80 GB"),
        at(minute + 5, "Load weight end. elapsed=240.0 s, type=Target, avail mem=24.10 GB"),
        at(minute + 5, "Load weight begin. avail mem=24.00 GB", 10),
        at(minute + 5, "Load weight end. elapsed=6.9 s, type=Drafter, avail mem=22.90 GB", 20),
        at(minute + 6, "max_total_num_tokens=4096, chunked_prefill_size=4096"),
    ]
    return "".join([*lines, *([at(minute + 10, "The server is fired up and ready to roll!")] if ready else [])])


def decode(minute: int, length: str | None = "3.10", tokens: int = 800, count: int = 1) -> str:
    accept = f"accept len: {length}, accept rate: 0.70, " if length else ""
    text = f"Decode batch, #running-req: 1, #token: {tokens}, token usage: 0.10, {accept}cuda graph: True, gen throughput (token/s): 80.00, #queue-req: 0"
    return at(minute, text) * count


def bundle(tmp_path: Path, log: str, **files: Any) -> Path:
    """A bundle taken at 10:30. files: names with __ for / and _dot_ for a dot; values as text or JSON."""
    path = tmp_path / "b"
    path.mkdir()
    manifest = {"schema": 2, "host": "infer1", "unit": "sglang.service", "time": "2026-11-29T103000Z", "files": []}
    (path / "server.log").write_text(log)
    properties = files.pop("properties", RUNNING)
    (path / "unit-properties.txt").write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
    files = {"processes.json": [SERVER, SCHEDULER], "answers.json": FINE, "manifest.json": manifest, **files}
    for name, content in files.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def look(tmp_path: Path, log: str, **files: Any) -> Diagnosis:
    return diagnosis.diagnose(read(bundle(tmp_path, log, **files)))


def codes(found: Diagnosis) -> list[str]:
    return [suspect.finding.code for suspect in found.suspects]


def crash(minute: int, *, counter: int = 0) -> str:
    again = (
        unit(minute, f"sglang.service: Scheduled restart job, restart counter is at {counter}.", 9) if counter else ""
    )
    return (
        unit(minute, "Starting sglang.service - SGLang server (h)...")
        + at(minute, "server_args=ServerArgs()", 1)
        + at(minute, "Scheduler hit an exception: Traceback (most recent call last):", 2)
        + at(minute, "x", 2).partition(": [")[0]
        + ": RuntimeError: captured 2 of 3 aux hidden states\n"
        + unit(minute, "sglang.service: Main process exited, code=killed, status=9/KILL", 5)
        + unit(minute, "sglang.service: Failed with result 'signal'.", 6)
        + again
    )
