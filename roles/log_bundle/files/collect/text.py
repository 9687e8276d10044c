"""What a collector writes: masked lines of files, commands and the journal, never more than a limit."""

from __future__ import annotations

import collections
import hashlib
import io
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from pivot.bundles.redact import Redactor

TIMEOUT = 60
MAX_LINE = 1 << 20
BLOCK = 1 << 18
WIDE = re.compile(rb"(?:[^\0]\0){8,}[^\0]?|(?:\0[^\0]){8,}\0?")


class MissingError(Exception):
    """An item that could not be collected; failed says that it should have been there."""

    def __init__(self, reason: str, failed: bool = False) -> None:
        super().__init__(reason)
        self.failed = failed


class Sink:
    """One file of the bundle: lines come in, masked blocks go out, never more than the limit."""

    def __init__(self, path: Path, redactor: Redactor) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        self.redactor = redactor
        self.digest = hashlib.sha256()
        self.lines: list[str] = []
        self.pending = 0
        self.cuts: list[str] = []

    def block(self, raw: bytes) -> None:
        """Add whole lines at once; a key that goes on after them stays with what follows."""
        text = decoded(raw)
        self.lines.append(text)
        self.pending += len(text)
        if self.pending >= BLOCK:
            inside_key = "-----BEGIN " in text and text.rfind("-----BEGIN ") > text.rfind("-----END ")
            if not inside_key or self.pending >= 4 * BLOCK:
                self.flush()

    def line(self, raw: bytes, cut_end: bool = False) -> None:
        """Add one line; cut_end says that its end is missing, so that its last word may be part of a secret."""
        text = decoded(raw)
        if cut_end:
            self.flush()
            text = self.redactor.text(text, cut_end=True) + "\n"
            if "a line was cut" not in self.cuts:
                self.cuts.append("a line was cut")
        self.lines.append(text)
        self.pending += len(text)
        if self.pending >= BLOCK:
            recent = "".join(self.lines[-99:])
            inside_key = recent.rfind("-----BEGIN ") > recent.rfind("-----END ")  # is masked as one piece
            if not inside_key or self.pending >= 2 * BLOCK:
                self.flush()

    def cut(self, note: str) -> None:
        """Leave a mark in the text, and the note for the manifest, that something is left out here."""
        self.flush()
        self.cuts.append(note)
        self.put(f"[cut: {note}]\n".encode())

    def put(self, raw: bytes) -> None:
        """Write bytes as they are, into the hash too."""
        self.file.write(raw)
        self.digest.update(raw)

    def flush(self) -> None:
        """Mask and write what has come in so far."""
        if self.lines:
            text = self.redactor.text("".join(self.lines))
            self.put(text.encode("utf-8", "surrogateescape"))
            self.lines, self.pending = [], 0

    def close(self) -> None:
        """Write the rest."""
        self.flush()
        self.file.close()


def decoded(raw: bytes) -> str:
    """Text as it is masked: letters of two bytes (UTF-16), in which no secret would be seen, as plain ones."""
    if b"\0" in raw:
        raw = WIDE.sub(lambda found: found.group().replace(b"\0", b""), raw)
    return raw.decode("utf-8", "surrogateescape")


def pump(source: Any, sink: Sink, limit: int) -> int:
    """Lines from a file to sink, at most `limit` bytes; returns how many were taken."""
    taken = 0
    while limit - taken >= BLOCK:  # as long as lines are shorter than that, many at once
        chunk = source.read(BLOCK)
        end = chunk.rfind(b"\n") + 1
        source.seek(end - len(chunk), os.SEEK_CUR)
        if not end:
            break
        taken += end
        sink.block(chunk[:end])
    while taken < limit:
        raw = source.readline(min(MAX_LINE, limit - taken))
        if not raw:
            break
        taken += len(raw)
        whole = raw.endswith(b"\n") or not source.peek(1)
        sink.line(raw, cut_end=not whole)
        if not whole:
            taken += skip_line(source, limit - taken)
    return taken


def skip_line(source: io.BufferedReader, limit: int) -> int:
    """Read on to the end of the line, at most `limit` bytes; returns how many were read."""
    skipped = 0
    while skipped < limit:
        raw = source.readline(min(MAX_LINE, limit - skipped))
        skipped += len(raw)
        if not raw or raw.endswith(b"\n"):
            break
    return skipped


def copy_file(path: Path, sink: Sink, limit: int) -> None:
    """The file as it is now: whole, or its first quarter and its end, with a mark between."""
    with path.open("rb") as source:
        size = os.fstat(source.fileno()).st_size
        if size <= limit:
            pump(source, sink, size or limit)
            if not size and source.read(1):  # files of /proc and /sys have no size
                sink.cut(f"more than {limit} bytes")
            return
        head = pump(source, sink, limit // 4)
        start = max(head, size - (limit - limit // 4))
        source.seek(start)
        start += skip_line(source, size - start)  # its beginning, a secret's name perhaps, is gone
        sink.cut(f"{start - head} of {size} bytes left out")
        pump(source, sink, size - start)


def put(sink: Sink, raw: bytes, limit: int) -> None:
    """A short output; cut at a line's end where it is longer than the limit."""
    kept = raw if len(raw) <= limit else raw[: raw.rfind(b"\n", 0, limit) + 1] or raw[:limit]
    for line in kept.splitlines(keepends=True):
        sink.line(line, cut_end=len(kept) < len(raw) and not line.endswith((b"\n", b"\r")))
    if len(kept) < len(raw):
        sink.cut(f"{len(raw) - len(kept)} of {len(raw)} bytes left out")


def run(argv: list[str], given: bytes = b"") -> tuple[int, bytes, str]:
    """Exit status, output and errors of a short command, which reads what is given."""
    environment = {"PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"), "LC_ALL": "C.UTF-8", "TZ": "UTC"}
    try:
        done = subprocess.run(argv, input=given, capture_output=True, timeout=TIMEOUT, check=False, env=environment)
    except FileNotFoundError:
        raise MissingError(f"there is no {argv[0]} on this host", failed=True) from None
    except subprocess.TimeoutExpired:
        raise MissingError(f"{argv[0]} did not end within {TIMEOUT} s", failed=True) from None
    return done.returncode, done.stdout, done.stderr.decode(errors="replace").strip()


def stream(argv: list[str], limit: int, keep_end: bool = False) -> tuple[collections.deque[bytes], bool]:
    """The first `limit` bytes of a command's output as lines (or the last, keep_end), and whether there was more."""
    lines: collections.deque[bytes] = collections.deque()
    size, more = 0, False
    try:
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            output, problems = child.stdout, child.stderr
            assert output is not None and problems is not None  # noqa: S101 - pipes were asked for
            for raw in iter(lambda: output.readline(MAX_LINE), b""):
                lines.append(raw)
                size += len(raw)
                if size > limit and keep_end:
                    while size > limit and len(lines) > 1:
                        size -= len(lines.popleft())
                elif size > limit:
                    lines.pop()
                    more = True
                    child.terminate()
                    break
            errors = b"" if more else problems.read(2000)
    except FileNotFoundError:
        raise MissingError(f"there is no {argv[0]} on this host", failed=True) from None
    if child.returncode and not more:
        raise MissingError(
            f"{argv[0]} ended with {child.returncode}: {errors.decode(errors='replace').strip()}", failed=True
        )
    return lines, more


def journal(base: list[str], sink: Sink, limit: int, head: bool) -> None:
    """Entries in their order: all, or the beginning (if head) and the end, with a mark between."""
    first, more = stream(base, limit)
    if not more:
        for raw in first:
            sink.line(raw)
        return
    beginning: list[bytes] = []
    size = 0
    while head and first and size + len(first[0]) <= limit // 4:
        size += len(first[0])
        beginning.append(first.popleft())
    average = max(16, limit // max(1, len(first) + len(beginning)))
    last, _ = stream([*base, f"--lines={2 * limit // average}"], limit - size, keep_end=True)
    for raw in beginning:
        sink.line(raw)
    kept = sum(len(raw) for raw in last)
    sink.cut(
        f"only the first {size} and the last {kept} bytes are here" if head else f"only the last {kept} bytes are here"
    )
    for raw in last:
        sink.line(raw)
