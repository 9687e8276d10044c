"""A file of lines in a directory whose files together may only grow so far."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

# other processes write there too: the directory is measured again after this many bytes of our own, or this share of
# what may lie there, and before every line once little room is left
MEASURE_EVERY = 1024 * 1024
SHARE = 64
LITTLE = 8
# room kept for the line that says why recording ended
LAST_LINE = 512


class FullError(Exception):
    """Nothing more is written; the text says why."""


class Journal:
    """One new file, appended to line by line. `path`: it; `max_bytes`: of all files of its suffix beside it."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Create the file; an OSError comes through."""
        self.path = path
        self._max_bytes = max_bytes
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_EXCL, 0o640)
        self._left = max_bytes - occupied(path.parent, path.suffix)
        self._unmeasured = 0

    def append(self, line: bytes) -> None:
        """Write a whole line; FullError when quota or volume have no room for it."""
        due = self._unmeasured > min(MEASURE_EVERY, self._max_bytes // SHARE)
        if due or self._left < self._max_bytes // LITTLE:
            self._left = self._max_bytes - occupied(self.path.parent, self.path.suffix)
            self._unmeasured = 0
        if len(line) + LAST_LINE > self._left:
            raise FullError(f"the records reached PIVOT_PROBE_MAX_BYTES={self._max_bytes}")
        try:
            written = os.write(self._descriptor, line)
        except OSError as error:
            raise FullError(f"writing failed: {error.strerror}") from error
        self._left -= written
        self._unmeasured += written
        if written != len(line):
            raise FullError("writing failed: the volume is full")

    def last(self, line: bytes) -> None:
        """Write the line that says why no more follow, where it still fits."""
        with contextlib.suppress(OSError):  # the volume may be full: the reason also stands in the log
            os.write(self._descriptor, line)


def occupied(directory: Path, suffix: str) -> int:
    """Bytes that the files of this suffix in a directory take."""
    used = 0
    for path in directory.glob(f"*{suffix}"):
        with contextlib.suppress(FileNotFoundError):  # collected and removed meanwhile
            used += path.stat().st_size
    return used
