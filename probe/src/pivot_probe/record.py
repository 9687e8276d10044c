"""JSON lines on disk: one file per process, bounded, never in the way of a request."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

SCHEMA = 1
DEFAULT_MAX_BYTES = 256 * 1024 * 1024
DEFAULT_ROWS = 16
SUFFIX = ".jsonl"
# the directory is measured again after this many bytes of our own: other processes write there too
MEASURE_EVERY = 1024 * 1024
# room kept for the line that says why recording ended
LAST_LINE = 512


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the environment asks for. directory: existing; max_bytes: of all records in it; rows: per forward."""

    directory: Path
    max_bytes: int = DEFAULT_MAX_BYTES
    rows: int = DEFAULT_ROWS

    @classmethod
    def from_environment(cls) -> Settings | None:
        """Settings from ``PIVOT_PROBE_*``, None without ``PIVOT_PROBE_DIR``; ValueError says what is wrong."""
        name = os.environ.get("PIVOT_PROBE_DIR", "")
        if not name:
            return None
        directory = Path(name)
        if not directory.is_dir():
            raise ValueError(f"PIVOT_PROBE_DIR={name} is no directory")
        return cls(
            directory,
            max_bytes=_positive("PIVOT_PROBE_MAX_BYTES", DEFAULT_MAX_BYTES),
            rows=_positive("PIVOT_PROBE_ROWS", DEFAULT_ROWS),
        )


def _positive(name: str, default: int) -> int:
    """The environment variable as a whole number above 0; ValueError names the variable otherwise."""
    text = os.environ.get(name, "")
    if not text:
        return default
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(f"{name}={text} is no whole number above 0")
    return int(text)


class Recorder:
    """Appends records to this process's file until the directory is full; afterwards it only counts.

    A failure of a hook becomes a record (the 1st, 2nd, 4th, 8th … of each hook). A failure to write ends the
    recording: neither ever reaches the caller.
    """

    def __init__(self, settings: Settings) -> None:
        """Open the file (an OSError comes through); nothing is written yet."""
        self.settings = settings
        self.ended = ""
        self._lock = threading.Lock()
        self._failures: Counter[str] = Counter()
        self._number = 0
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self.path = settings.directory / f"{stamp}-{os.getpid()}{SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_EXCL
        self._descriptor = os.open(self.path, flags, 0o640)
        self._left = self._room()
        self._unmeasured = 0

    def write(self, point: str, **fields: Any) -> int:
        """Append one record; returns its number within the process, 0 when nothing is recorded any more."""
        with self._lock:
            if self.ended:
                return 0
            self._number += 1
            record = {"point": point, "n": self._number, "t": round(time.time(), 6), **fields}
            line = (json.dumps(record, separators=(",", ":")) + "\n").encode()
            if not self._fits(len(line)):
                self._end(f"the records reached PIVOT_PROBE_MAX_BYTES={self.settings.max_bytes}")
                return 0
            try:
                self._append(line)
            except OSError as error:
                self._end(f"writing failed: {error.strerror}")
                return 0
            return self._number

    def failure(self, hook: str, error: Exception) -> None:
        """Count a hook's failure and record it when the count is a power of two."""
        with self._lock:
            self._failures[hook] += 1
            count = self._failures[hook]
        if count & (count - 1) == 0:
            self.write("failure", hook=hook, count=count, error=f"{type(error).__name__}: {error}"[:300])

    def _append(self, line: bytes) -> None:
        """Write a whole line; a partial write (a full disk) is an OSError."""
        written = os.write(self._descriptor, line)
        self._left -= written
        self._unmeasured += written
        if written != len(line):
            raise OSError(0, "the volume is full")

    def _fits(self, size: int) -> bool:
        """Whether a line of this size may still be written."""
        if self._unmeasured > MEASURE_EVERY:
            self._left, self._unmeasured = self._room(), 0
        return size + LAST_LINE <= self._left

    def _room(self) -> int:
        """Bytes that may still be written, by what lies in the directory now."""
        used = 0
        for path in self.settings.directory.glob(f"*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):  # collected and removed meanwhile
                used += path.stat().st_size
        return self.settings.max_bytes - used

    def _end(self, reason: str) -> None:
        """Stop recording for good; the reason goes into the file where it still fits, and into the log."""
        self.ended = reason
        logger.warning("pivot_probe: recording has ended, serving goes on: %s", reason)
        last = json.dumps({"point": "end", "n": self._number, "reason": reason}) + "\n"
        with contextlib.suppress(OSError):  # the volume may be full: the log line above remains
            os.write(self._descriptor, last.encode())
