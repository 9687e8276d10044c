"""Records: numbered where something is observed, written by a thread of its own, never in the way of a request."""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from pivot_probe.journal import FullError, Journal
from pivot_probe.settings import Settings

logger = logging.getLogger(__name__)

SCHEMA = 2
SUFFIX = ".jsonl"
# records that may wait for the writer; beyond that they are dropped and counted
WAITING = 1024
# seconds between two looks at the clock, and between two bursts of writing: a killed process loses no more than that
PATIENCE = 0.5
PAUSE = 0.25
# seconds that a process which ends may spend on writing what still waits
FAREWELL = 3.0

Late = Callable[[int], dict[str, Any]]
"""A record's number → fields that were not at hand when it was made; the writer calls it."""


class _Job(NamedTuple):
    """A record that waits to be written."""

    number: int
    time: float
    point: str
    fields: dict[str, Any]
    late: Late | None


class Recorder:
    """Takes records and never waits: a thread writes them until quota, volume or time end the recording.

    A failure of a hook becomes a record (the 1st, 2nd, 4th, 8th … of each hook); a failure to write ends the
    recording. Neither ever reaches the caller. `ended`: why nothing is recorded any more, else empty.
    """

    def __init__(self, settings: Settings) -> None:
        """Open the file (an OSError comes through) and start the writer."""
        self.settings = settings
        self.ended = ""
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self._journal = Journal(settings.directory / f"{stamp}-{os.getpid()}{SUFFIX}", settings.max_bytes)
        self.path = self._journal.path
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._failures: Counter[str] = Counter()
        self._number = 0
        self._dropped = self._told = 0
        self._taken = self._done = 0
        self._thread = threading.Thread(target=self._work, name="pivot-probe", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._forked)

    # --- for those who observe

    def write(self, point: str, late: Late | None = None, **fields: Any) -> int:
        """Take one record; returns its number within the process, 0 when nothing is recorded any more.

        late: gives more fields, called by the writer; a record whose `late` raises is not written.
        """
        now = time.time()
        with self._lock:
            if self.ended or self._expired(now):
                return 0
            if self._queue.qsize() >= WAITING:
                self._number += 1
                self._dropped += 1
                return self._number
            if self._dropped > self._told:
                self._told = self._dropped
                self._put(now, "dropped", {"count": self._dropped}, None)
            return self._put(now, point, fields, late)

    def failure(self, hook: str, error: BaseException) -> None:
        """Count a hook's failure and record it when the count is a power of two."""
        with self._lock:
            self._failures[hook] += 1
            count = self._failures[hook]
        if count & (count - 1) == 0:
            self.write("failure", hook=hook, count=count, error=f"{type(error).__name__}: {error}"[:300])

    def close(self) -> None:
        """Write what still waits, within a few seconds; nothing is recorded afterwards."""
        self._queue.put(None)
        self._thread.join(FAREWELL)
        self.ended = self.ended or "the process ends"

    def flush(self) -> None:
        """Return when everything taken so far is written. For tests: whoever serves never waits."""
        while self._done < self._taken and self._thread.is_alive():
            time.sleep(0.01)

    def _put(self, now: float, point: str, fields: dict[str, Any], late: Late | None) -> int:
        self._number += 1
        self._taken = self._number
        self._queue.put(_Job(self._number, round(now, 6), point, fields, late))
        return self._number

    def _expired(self, now: float) -> bool:
        return self.settings.until is not None and now >= self.settings.until

    def _forked(self) -> None:
        """In a forked child there is no writer, and the file is its parent's."""
        self.ended = "a forked process"

    # --- the writer

    def _work(self) -> None:
        """Write until told to stop or until the recording ends."""
        while not self.ended:
            try:
                job = self._queue.get(timeout=PATIENCE)
            except queue.Empty:
                if self._expired(time.time()):
                    self._end(f"PIVOT_PROBE_UNTIL={self.settings.until_text} has come")
                continue
            if job is None:
                return
            try:
                self._finish(job)
            except FullError as error:
                self._end(str(error))
            self._done = job.number
            if self._queue.empty():
                time.sleep(PAUSE)

    def _finish(self, job: _Job) -> None:
        """Complete one record and append it; FullError when there is no room for it."""
        fields = job.fields
        if job.late is not None:
            try:
                fields = {**fields, **job.late(job.number)}
            except Exception as error:  # noqa: BLE001 - counted and recorded; the writer goes on
                self.failure(f"late fields of {job.point}", error)
                return
        record = {"point": job.point, "n": job.number, "t": job.time, **fields}
        self._journal.append((json.dumps(record, separators=(",", ":")) + "\n").encode())

    def _end(self, reason: str) -> None:
        """Stop recording for good; the reason goes into the file where it still fits, and into the log."""
        self.ended = reason
        logger.warning("pivot_probe: recording has ended, serving goes on: %s", reason)
        with self._lock:
            self._number += 1
            last = {"point": "end", "n": self._number, "t": round(time.time(), 6), "reason": reason}
        self._journal.last((json.dumps(last) + "\n").encode())
