"""Send files to a host with rsync, in a process that outlives the play: ``python -m pivot.checkpoints.weights_send
PLACE``.

The files, and the keys that open the host, are on the controller, so the sender has to be here. It is a session of its
own rather than a systemd unit, because a controller may be a laptop or a container that systemd does not run. A killed
play, or a lost connection to the controller, leaves it at work; a lost connection to the host it takes up again, where
every file was. The next run finds it by PLACE and follows it. In PLACE: `spec.json` what to send, `progress.json` how
far it is, `alive` locked as long as it lives.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from pivot.transfer import rsync_to

PAUSES = (1, 2, 4, 8, 16, 32)  # seconds before another attempt; bytes that arrive in one begin the row again
LOST = (10, 12, 30, 35, 255)  # rsync's and ssh's exit codes for connections that broke
BEGINNING = 120  # seconds that a sender gets before it has said a word
PULSE = 0.5  # seconds between two words about the progress
WINDOW = 20  # of them, over which the rate is taken
DONE = re.compile(r"\s*([\d,]+)\s+\d+%")


def rsync_command(
    source: str, destination: str, connection: Mapping[str, Any], receiver: Sequence[str], names: Path
) -> list[str]:
    """The rsync call that sends the files that `names` lists, one a line.

    connection: Ansible's variables of the host, see `pivot.transfer.rsync_to`; receiver: the words that become
    rsync on the host. Files grow in place and are continued where they end: what was there is not read again, since the
    host hashes everything before it is published. Nothing on the host is ever deleted.
    """
    extra = f"{connection.get('ansible_ssh_extra_args') or ''} -o ServerAliveInterval=15 -o ServerAliveCountMax=4"
    options = ["--recursive", "--append", "--chmod=D755,F644", "--info=progress2", f"--files-from={names}"]
    if receiver:
        options.append(f"--rsync-path={shlex.join(receiver)}")
    return rsync_to(source, destination, {**connection, "ansible_ssh_extra_args": extra.strip()}, options)


def place_of(host: str, root: str) -> Path:
    """The directory of the sender for one root of one host; `host` is what rsync calls it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "pivot/weights" / hashlib.sha256(f"{host} {root}".encode()).hexdigest()[:16]


def alive(place: Path) -> bool:
    """Whether a sender is at work."""
    with contextlib.suppress(FileNotFoundError), (place / "alive").open() as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def told(place: Path) -> dict[str, Any]:
    """What the sender wrote last; empty when there was none."""
    try:
        return dict(json.loads((place / "progress.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def begin(place: Path, sends: Sequence[Mapping[str, Any]]) -> None:
    """Start a sender. sends: each with key, argv, names (of files) and size (bytes)."""
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    (place / "progress.json").unlink(missing_ok=True)
    (place / "spec.json").write_text(json.dumps(list(sends)), encoding="utf-8")
    with (place / "log").open("w") as log:
        sender = subprocess.Popen(
            [sys.executable, "-m", "pivot.checkpoints.weights_send", str(place)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    limit = time.monotonic() + BEGINNING
    while not told(place):
        if time.monotonic() > limit or (sender.poll() is not None and not told(place)):
            raise OSError(f"the sender did not begin: {(place / 'log').read_text(errors='replace').strip()[-300:]}")
        time.sleep(0.02)


class _Progress:
    """What a person who follows is told; the shape is that of weights_job.py."""

    def __init__(self, place: Path) -> None:
        self.path = place / "progress.json"
        self.state: dict[str, Any] = {
            "phase": "beginning",
            "done": 0,
            "total": 0,
            "rate": 0.0,
            "ended": "",
            "error": "",
        }
        self._seen: collections.deque[tuple[float, int]] = collections.deque(maxlen=WINDOW)
        self._last = 0.0

    def begin(self, phase: str, total: int) -> None:
        """A new phase."""
        self._seen.clear()
        self.tell(phase=phase, total=total, done=0)

    def done(self, count: int) -> None:
        """So many bytes are there; written down now and then."""
        self.state["done"] = count
        if time.monotonic() - self._last > PULSE:
            self.tell()

    def tell(self, **more: Any) -> None:
        """Write it down."""
        self.state.update(more)
        self._last = time.monotonic()
        self._seen.append((self._last, self.state["done"]))
        (first, before), (last, now) = self._seen[0], self._seen[-1]
        self.state["rate"] = (now - before) / (last - first) if last > first else 0.0
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps(self.state), encoding="utf-8")
        fresh.replace(self.path)


def _counts(stream: IO[bytes]) -> Iterator[int]:
    """The bytes that rsync says it has sent; its lines end with carriage returns."""
    rest = b""
    while block := os.read(stream.fileno(), 4096):
        *lines, rest = re.split(rb"[\r\n]", rest + block)
        for line in lines:
            if found := DONE.match(line.decode(errors="replace")):
                yield int(found[1].replace(",", ""))


def attempt(argv: Sequence[str], progress: _Progress, errors: Path) -> tuple[int, int, str]:
    """Run rsync once: its exit code, the bytes it sent, and what it complained about."""
    sent = 0
    before = progress.state["done"]
    with errors.open("w+") as complaints:
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, stderr=complaints) as rsync:
            assert rsync.stdout is not None  # noqa: S101 - it is a pipe
            for sent in _counts(rsync.stdout):
                progress.done(before + sent)
        complaints.seek(0)
        return rsync.returncode, sent, complaints.read()


def sentence(code: int, complaints: str, root: str) -> str:
    """Why rsync ended, for a person."""
    if "No space left on device" in complaints:
        return f"the volume of {root} is full: what has arrived is kept; free space there, then run again"
    for line in complaints.splitlines():
        if " is at work in " in line:
            return line.strip()
    said = [line.strip() for line in complaints.splitlines() if line.strip() and not line.startswith("rsync error:")]
    return f"rsync ended with {code}: {said[-1] if said else 'without a word'}; what has arrived is kept, run again"


def send(transfer: Mapping[str, Any], progress: _Progress, place: Path) -> str:
    """Send one model's files, taking up lost connections; empty, or a sentence."""
    # a name that began with # or ; would be a comment
    (place / "names").write_text("\n".join(f"./{name}" for name in transfer["names"]), encoding="utf-8")
    progress.begin(f"sending {transfer['key']}", transfer["size"])
    pauses = list(PAUSES)
    while True:
        code, sent, complaints = attempt(transfer["argv"], progress, place / "complaints")
        if not code:
            return ""
        text = sentence(code, complaints, transfer["root"])
        pauses = list(PAUSES) if sent else pauses
        if code not in LOST or not pauses or "rsync ended" not in text:
            return text
        progress.tell(phase=f"sending {transfer['key']} (connection lost, trying again)")
        time.sleep(pauses.pop(0))
        progress.tell(phase=f"sending {transfer['key']}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Send everything that PLACE/spec.json names; 0 when all of it was sent."""
    place = Path((sys.argv[1:] if arguments is None else arguments)[0])
    with (place / "alive").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 1  # another run was faster: it is followed
        progress = _Progress(place)
        error = ""
        for transfer in json.loads((place / "spec.json").read_text(encoding="utf-8")):
            error = send(transfer, progress, place)
            if error:
                break
        progress.tell(ended="failed" if error else "ok", error=error)
    return 1 if error else 0


if __name__ == "__main__":
    sys.exit(main())
