"""What a collector looks at: the unit, processes, files behind globs, dumps of the flight recorder."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import io
import json
import os
import pickle
import re
import stat
import time
from pathlib import Path
from typing import Any

from collect.text import MissingError, run


def properties(unit: str) -> dict[str, str]:
    """The unit's properties; empty where there is no systemd, and for a machine that has none of its own."""
    if not unit:
        return {}
    try:
        _, output, _ = run(["systemctl", "show", "--timestamp=us+utc", unit])
    except MissingError:
        return {}
    pairs = (line.partition("=") for line in output.decode(errors="replace").splitlines())
    return {name: value for name, _, value in pairs}


def expand(patterns: list[str]) -> list[Path]:
    """The files behind paths, directories (with all below) and globs, each once, in order; never a device or socket."""
    found: dict[str, None] = {}
    for pattern in patterns:
        for name in sorted(glob.glob(pattern)):
            if os.path.isdir(name) and not os.path.islink(name):
                for directory, _, files in sorted(os.walk(name)):
                    found.update(dict.fromkeys(os.path.join(directory, file) for file in sorted(files)))
            else:
                found[name] = None
    return [Path(name) for name in found if stat.S_IFMT(os.lstat(name).st_mode) in (stat.S_IFREG, stat.S_IFLNK)]


def process(pid: int) -> tuple[dict[str, str], list[str]]:
    """Environment and command line of a process; both empty once it is gone."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "surrogateescape")
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "surrogateescape")
    except (FileNotFoundError, ProcessLookupError):
        raise MissingError("the service's main process has just ended") from None
    pairs = (variable.partition("=") for variable in raw.split("\0") if variable)
    return {name: value for name, _, value in pairs}, arguments.rstrip("\0").split("\0")


def scalar(text: str) -> str:
    """A plain or quoted one-line YAML or JSON scalar, without the comment behind it."""
    quoted = re.match(r"\"((?:[^\"\\]|\\.)*)\"|'((?:[^']|'')*)'", text)
    if quoted is None:
        return re.sub(r"\s+#.*", "", text).rstrip(",")
    if quoted.group(2) is not None:
        return quoted.group(2).replace("''", "'")
    try:
        return str(json.loads(quoted.group()))
    except ValueError:
        return quoted.group(1)


def look(pids: list[int]) -> dict[str, Any]:
    """State and CPU seconds of processes, as /proc shows them now."""
    tick = os.sysconf("SC_CLK_TCK")
    found: dict[int, dict[str, Any]] = {}
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            head, _, rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
            words = rest.split()
            waits = ""
            with contextlib.suppress(OSError):
                waits = Path(f"/proc/{pid}/wchan").read_text()
            found[pid] = {
                "name": head.partition("(")[2],
                "state": words[0],
                "parent": int(words[1]),
                "threads": int(words[17]),
                "seconds": round((int(words[11]) + int(words[12])) / tick, 2),
                "resident_mib": int(words[21]) * os.sysconf("SC_PAGE_SIZE") >> 20,
                "waits_in": waits,
            }
    return {"at": time.monotonic(), "processes": found}


class Plain(pickle.Unpickler):
    """Reads containers, texts and numbers; a pickle that names any class is refused, so nothing of it can run."""

    def find_class(self, module: str, name: str) -> Any:
        """Nothing is found."""
        raise pickle.UnpicklingError(f"it holds a {module}.{name}")


def flight(path: Path, limit: int) -> bytes:
    """A flight-recorder dump as JSON; MissingError says why it cannot be read."""
    size = path.stat().st_size
    if size > limit:
        raise MissingError(f"not copied: {size} bytes are more than the limit", failed=True)
    try:
        content = Plain(io.BytesIO(path.read_bytes())).load()
        return (json.dumps(content, indent=1, default=str) + "\n").encode("utf-8", "surrogateescape")
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, KeyError, ValueError,
            TypeError, RecursionError, MemoryError, OverflowError) as error:  # fmt: skip
        raise MissingError(f"not copied: no flight-recorder dump that can be read: {error}") from None


def sha256(path: Path) -> str:
    """Hash of a file, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as source:
        for block in iter(lambda: source.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()
