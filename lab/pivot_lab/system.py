"""Running programs, reading /proc, writing files, locking: what the rest of the lab stands on."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pivot_lab.errors import LabError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}


def say(text: str) -> None:
    """Print one line for the person at the terminal."""
    print(text, file=sys.stderr, flush=True)


def run(  # keywords of subprocess.run, passed through by name
    argv: Sequence[str | Path],
    *,
    ok: Sequence[int] = (0,),
    stdin: str | None = None,
    stdin_file: Path | None = None,
    log: Path | None = None,
    timeout: float = 600,
    env: dict[str, str] | None = None,
) -> str:
    """Run a program from `/` with a small environment and return its stdout.

    With `log`, stdout and stderr go to the end of that file instead. A missing program, an exit status outside
    `ok` or the timeout (seconds) is a LabError with the last line the program wrote.
    """
    command = [str(part) for part in argv]
    with contextlib.ExitStack() as stack:
        source: Any = {"input": stdin} if stdin is not None else {"stdin": subprocess.DEVNULL}
        if stdin_file is not None:
            source = {"stdin": stack.enter_context(stdin_file.open("rb"))}
        target: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        if log is not None:
            target = {"stdout": stack.enter_context(log.open("ab")), "stderr": subprocess.STDOUT}
        try:
            done = subprocess.run(
                command,
                **source,
                **target,
                cwd="/",
                env=ENVIRONMENT | (env or {}),
                text=True,
                timeout=timeout,
                check=False,
                errors="replace",
            )
        except FileNotFoundError:
            raise LabError(
                f"the program {command[0]!r} is missing: install the Debian packages listed in lab/debian-packages.txt"
            ) from None
        except subprocess.TimeoutExpired:
            raise LabError(f"`{' '.join(command)}` did not end within {timeout:.0f} s") from None
    if done.returncode not in ok:
        detail = f"see {log}" if log else ((done.stderr or done.stdout or "").strip().splitlines() or ["no output"])[-1]
        raise LabError(f"`{' '.join(command)}` failed with exit status {done.returncode}: {detail}")
    return done.stdout or ""


def write(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace a file atomically; its mode holds from the first byte."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        os.fchmod(descriptor, mode)
        with os.fdopen(descriptor, "w") as stream:
            stream.write(text)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any]:
    """Return a file's JSON object; `{}` where there is none, a LabError where it is damaged."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise LabError(f"{path} is damaged ({error}): run `pivot-lab down`, then `pivot-lab up`") from None
    if not isinstance(data, dict):
        raise LabError(f"{path} holds no JSON object: run `pivot-lab down`, then `pivot-lab up`")
    return data


def write_json(path: Path, data: dict[str, Any], mode: int = 0o644) -> None:
    """Write a JSON object atomically."""
    write(path, json.dumps(data, indent=1, sort_keys=True) + "\n", mode)


@contextlib.contextmanager
def locked(path: Path, waiting: str = "") -> Iterator[None]:
    """Hold an exclusive lock on a file, which the holder may delete; says `waiting` when it has to wait."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            continue  # the directory was removed in between, by the holder's `down`
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if waiting:
                    say(waiting)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            try:
                current = path.stat().st_ino
            except FileNotFoundError:
                continue
            if current == os.fstat(descriptor).st_ino:
                yield
                return
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def step(what: str, log: Path | None = None, interval: float = 10) -> Iterator[None]:
    """Announce a long step, say every `interval` seconds that it still runs, and end with its duration."""
    begin = time.monotonic()
    finished = threading.Event()
    where = f" (log: {log})" if log else ""

    def remind() -> None:
        while not finished.wait(interval):
            say(f"  … {what}: {time.monotonic() - begin:.0f} s so far{where}")

    say(f"{what}{where}")
    reminder = threading.Thread(target=remind, daemon=True)
    reminder.start()
    try:
        yield
        say(f"  done in {time.monotonic() - begin:.1f} s")
    finally:
        finished.set()
        reminder.join()


def remove_tree(path: Path) -> None:
    """Remove a directory with all it holds, except what is mounted in it (that is a LabError)."""
    run(["rm", "-rf", "--one-file-system", "--", path])


def start_time(pid: int) -> str | None:
    """When a process started, in clock ticks since boot; None if there is none. Tells a reused pid apart."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else fields[19]


def mounted(path: Path) -> bool:
    """Whether something is mounted exactly here."""
    wanted = str(path).replace(" ", "\\040")
    return any(line.split()[4] == wanted for line in Path("/proc/self/mountinfo").read_text().splitlines())


def mounts_below(path: Path) -> list[Path]:
    """Mount points at or below a directory, deepest first."""
    points = (
        Path(line.split()[4].replace("\\040", " ")) for line in Path("/proc/self/mountinfo").read_text().splitlines()
    )
    return sorted((p for p in points if p == path or path in p.parents), key=lambda p: -len(p.parts))
