"""A host for the tests of model_weights: a directory of this machine, and the role's host files as the role runs them.

STAND-IN: there is no systemd here, so `systemd-run` is a script that starts the command in a session of its own, as a
transient unit would; molecule/model_weights has the real one.
"""

import hashlib
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pivot.checkpoints import weights
from pivot.checkpoints.manifest import FilePin, Manifest
from pivot.checkpoints.weights import Action, Plan, Step, Wanted

FILES = Path(__file__).parents[2] / "roles/model_weights/files"
SOURCES = {path.name: path.read_text() for path in FILES.glob("*.py")}
US = "tester@here:/clone"
SYSTEMD_RUN = """#!/bin/bash
# STAND-IN for systemd-run: the options are left out, the command gets a session of its own
while [[ $1 == --* ]]; do shift; done
here=$(dirname "$0")
if [[ -f $here/kill-at ]]; then set -- "$1" -I "$here/killer.py" "$here" "${@:3}"; fi
PATH=${PATH#*:} setsid "$@" >>"$here/journal" 2>&1 </dev/null &
echo $! >"$here/job"
"""
SYSTEMCTL = """#!/bin/bash
# STAND-IN for `systemctl is-active`, of the one job that systemd-run started last
kill -0 "$(<"$(dirname "$0")/job")" 2>/dev/null
"""

KILLER = """
import atexit, os, pathlib, runpy, signal, sys
here = pathlib.Path(sys.argv[1])
left = int((here / "kill-at").read_text())
begin = left
def count(event, arguments):
    global left
    if event not in EVENTS or (event == "open" and str(arguments[0]).endswith((".py", ".pyc"))):
        return
    left -= 1
    if left < 0:
        os.killpg(0, signal.SIGKILL)
EVENTS = {"open", "os.rename", "os.remove", "os.chmod", "os.link", "os.symlink", "os.mkdir", "os.rmdir"}
sys.argv = sys.argv[2:]
atexit.register(lambda: os.write(os.open(str(here / "operations"), os.O_WRONLY | os.O_CREAT), b"%d" % (begin - left)))
sys.addaudithook(count)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def filters() -> dict[str, Any]:
    """The filters of plugins/filter/pivot_weights.py by name, as Ansible loads them."""
    path = FILES.parents[2] / "plugins/filter/pivot_weights.py"
    return dict(runpy.run_path(str(path))["FilterModule"]().filters())


def content(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)  # noqa: S311 - repeatable on purpose


TOY = {"config.json": b"{}", "sub/model.safetensors": b"weights" * 1000}


def toy(files: dict[str, bytes] = TOY, name: str = "lab/toy", **sources: Any) -> Wanted:
    """What is wanted of a model with these contents."""
    pins = {file: FilePin(hashlib.sha256(data).hexdigest(), len(data)) for file, data in files.items()}
    return Wanted(Manifest(name, "r1", pins, {}, {}), **sources)


def write_files(place: Path, contents: dict[str, bytes]) -> Path:
    for name, data in contents.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(data)
    return place


class Host:
    """A root directory, and what the role does on it. `contents` is what the model's source holds."""

    def __init__(self, place: Path, wanted: Wanted | None = None, contents: dict[str, bytes] = TOY) -> None:
        self.root, self.runs, self.bin = place / "models", place / "run", place / "bin"
        self.source, self.contents = place / "source", contents
        write_files(self.source, contents)
        self.wanted = wanted or toy(contents, source=str(self.source))
        self.base = self.root / self.wanted.manifest.repository
        self.release, self.incoming = self.base / "r1", self.base / ".incoming-r1"
        self.record = self.base / ".verified-r1.json"
        self.jobs = self.runs / weights.digest_of(str(self.root))
        self.bin.mkdir()
        for name, text in {"systemd-run": SYSTEMD_RUN, "systemctl": SYSTEMCTL}.items():
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)
        (self.bin / "killer.py").write_text(KILLER)
        self.hub: dict[str, Any] = {}
        self.job = 0

    def run(self, action: str, *models: dict[str, Any], **more: Any) -> dict[str, Any]:
        """One action of weights_state.py, sent as the role sends it."""
        common = {"run": str(self.runs), "by": US}
        argument = weights.host_arguments(action, str(self.root), models, **{**common, **more})
        path = f"{self.bin}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            [sys.executable, "-I", "-", argument],
            input=f"SOURCES = {json.dumps(SOURCES)}\n{SOURCES['weights_state.py']}",
            capture_output=True, text=True, check=True, env={**os.environ, "PATH": path},
        )  # fmt: skip
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def look(self, **more: Any) -> dict[str, Any]:
        return self.run("look", self.wanted.for_host(), **more)

    def plan(self, job: str = "", **more: Any) -> Plan:
        return weights.plan([self.wanted], self.look(job=job, **more), US, verified=bool(job))

    def start(self, step: Step, **more: Any) -> str:
        self.job += 1
        answer = self.run("start", step.for_host(), job=f"j{self.job}", hub=self.hub, **more)
        assert answer == {"started": f"j{self.job}"}, answer
        return f"j{self.job}"

    def end(self) -> dict[str, Any]:
        """What the job says when it has ended."""
        limit = time.monotonic() + 60
        while True:
            told = self.run("watch", seconds=5)
            if not told.get("alive"):
                return told
            assert time.monotonic() < limit, told

    def kill(self) -> None:
        """Kill the unit: the job's session, with the hub's client where there is one."""
        pid = json.loads((self.jobs / "alive").read_text())["pid"]
        os.killpg(pid, signal.SIGKILL)
        while self.run("watch", seconds=1).get("alive"):
            pass

    def kill_at(self, operation: int | None) -> None:
        """Have the next jobs kill themselves at so many operations on files; None: let them live."""
        (self.bin / "kill-at").unlink(missing_ok=True)
        if operation is not None:
            (self.bin / "kill-at").write_text(str(operation))

    def operations(self) -> int:
        """How many operations on files the last job made, which was let live."""
        return int((self.bin / "operations").read_text())

    def receive(self, names: tuple[str, ...]) -> None:
        """What rsync does between prepare and publication: files grow at their end."""
        for name in names:
            path = self.incoming / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as stream:
                stream.write(self.contents[name][stream.tell() :])

    def converge(self, **more: Any) -> list[str]:
        """What the role does in one run: the actions it took, and at their end what the job said of failed files."""
        made, done = self.plan(**more), []
        for step in made.of(Action.VERIFY):
            job = self.start(step, **more)
            assert self.end().get("ended") == "ok"
            done.append("verify")
            made = self.plan(job, **more)
        assert not [finding for finding in made.findings if finding.severity == "error"], made.findings
        for step in made.of(Action.SETTLE):
            assert self.run("settle", step.for_host()) == {"settled": 1}
            done.append("settle")
        for step in made.of(Action.PUBLISH):
            assert self.run("prepare", step.for_host()) == {"prepared": 1}
            self.receive(step.send)
            self.start(step, **more)
            told = self.end()
            done.append("publish" if told.get("ended") == "ok" else told.get("error") or json.dumps(told.get("failed")))
        return done

    def served(self) -> dict[str, bytes]:
        """The release as a server would read it; empty when there is none."""
        if not self.release.is_dir():
            return {}
        paths = [path for path in sorted(self.release.rglob("*")) if not path.is_dir()]
        return {path.relative_to(self.release).as_posix(): path.read_bytes() for path in paths}

    def names(self) -> list[str]:
        return sorted(path.name for path in self.base.iterdir())


def flip(path: Path, at: int = 0) -> None:
    """Change one byte and put the times back: only the change time or a hash can tell."""
    before = path.stat()
    with path.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
