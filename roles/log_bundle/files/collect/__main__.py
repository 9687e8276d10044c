"""Collect logs and state of one service into a private directory of this host, secrets masked.

Argument: JSON with ``rows`` (of `pivot.bundles.bundle_table.table`), ``unit``, ``total_limit`` in bytes and what it is,
``directories`` (where the private directory may be made), ``prompts`` (whether texts of requests may stay) and
``owner`` (for whom: what an interrupted run left for the same one goes). Prints one JSON object: ``staging``,
``entries`` (one for each file, or for what is missing with the reason), ``context``.
Exits 1 with one sentence, and leaves nothing behind, when that is impossible.
"""

from __future__ import annotations

import collections
import contextlib
import glob
import json
import os
import re
import resource
import shutil
import signal
import stat
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from collect.look import expand, flight, look, process, properties, scalar, sha256
from collect.server import Server
from collect.text import MissingError, Sink, copy_file, journal, put, run, stream
from pivot.bundles.redact import MASK, Redactor, secret_name, secret_values

PREFIX = "pivot-bundle-"
STALE_SECONDS = 6 * 3600  # a staging directory this old belongs to a run that died, whoever it was for
KEEP_FREE = 64 << 20
MAX_PROCESSES = 256
LEARNED = 1 << 20  # bytes of a configuration file in which secrets are looked for
LIST_PACKAGES = (
    "import importlib.metadata as m, json, sys; "
    "json.dump({'python': sys.version, 'packages': dict(sorted((d.metadata['Name'], d.version) "
    "for d in m.distributions()))}, sys.stdout, indent=1)"
)


class Collector:
    """One run: rows in, files and entries out."""

    def __init__(self, request: dict[str, Any], staging: Path, room: int) -> None:
        self.request = request
        self.staging = staging
        self.budget = min(request["total_limit"], room)
        own = request.get("total_limit_is", "log_bundle_total_limit_mib")
        self.limit_is = own if request["total_limit"] <= room else f"free space of {staging.parent}"
        self.redactor = Redactor(prompts=bool(request.get("prompts")))
        self.entries: list[dict[str, Any]] = []
        self.unit = properties(request["unit"])
        self.pid = int(self.unit.get("MainPID") or 0)
        self.settings = self.learn()
        self.first_look = look(self.pids())
        self.server = Server(self.settings, self.redactor)

    def pids(self) -> list[int]:
        """The processes of the unit, by its cgroup, and where that cannot be read those that descend from the first."""
        found = {self.pid} if self.pid else set()
        group = self.unit.get("ControlGroup", "").lstrip("/")
        for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified"):
            with contextlib.suppress(OSError):
                for path in Path(root, group).rglob("cgroup.procs") if group else ():
                    found.update(int(word) for word in path.read_text().split())
        for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
            with contextlib.suppress(OSError, ValueError, IndexError):
                if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) in found:
                    found.add(pid)
        return sorted(found)[:MAX_PROCESSES]

    def learn(self) -> dict[str, str]:
        """Take the secrets of configuration and process as known; returns the way to the server (host, port, key)."""
        settings: dict[str, str] = {}
        for row in self.request["rows"]:
            if row["name"] != "config":
                continue
            for path in expand(row["what"]):
                if path.is_symlink():  # not collected either; a drafter's view links to weights and vocabularies
                    continue
                try:
                    with path.open("rb") as source:
                        text = source.read(LEARNED).decode("utf-8", "surrogateescape")
                except OSError:
                    continue  # its own entry will say why
                self.redactor.learn(secret_values(text))
                for name, value in re.findall(r"(?m)^[\"']?(host|port|api[-_]key)[\"']?\s*[:=]\s*(.+?)\s*$", text):
                    settings[name.replace("_", "-")] = scalar(value)
        if self.pid:
            with contextlib.suppress(MissingError, OSError):  # it has just ended: a server that crashes again and again
                self.learn_process()
        return settings

    def learn_process(self) -> None:
        """Take the secrets of environment and command line as known."""
        environment, arguments = process(self.pid)
        self.redactor.learn(
            value
            for name, value in environment.items()
            if len(value) >= 6 and secret_name(name) and not value.isdigit()
        )
        masked = Redactor().arguments(arguments)
        self.redactor.learn(
            raw.partition("=")[2] if raw.startswith("-") else raw
            for raw, shown in zip(arguments, masked)  # noqa: B905 - Python 3.9
            if shown == MASK or (shown.endswith("=" + MASK) and raw.startswith("-"))
        )

    def row(self, row: dict[str, Any]) -> None:
        """Collect one row; a failure becomes an entry, and the run goes on."""
        try:
            getattr(self, "take_" + row["kind"])(row)
        except MissingError as missing:
            self.absent(row, row["name"], str(missing), missing.failed)
        except OSError as error:
            self.absent(row, row["name"], f"{error.strerror or error}: {error.filename or row['name']}", True)

    def absent(self, row: dict[str, Any], name: str, reason: str, failed: bool) -> None:
        """The entry of what is not there."""
        source = row["what"][:1] if row["kind"] == "script" else row["what"]
        self.entry(row, name, " ".join(source), reason=self.redactor.text(reason), failed=failed)

    def entry(self, row: dict[str, Any], name: str, source: str, **more: Any) -> None:
        """One line of the manifest."""
        self.entries.append(
            {
                "name": name,
                "item": row["name"],
                "source": self.redactor.text(source),
                "bytes": None,
                "sha256": None,
                "truncated": False,
                "reason": "",
                "failed": False,
                "masked": 0,
                "masked_as": {},
                "sensitivity": row["sensitivity"],
                "required": row["required"],
                "tail": row["tail"],
                **more,
            }
        )

    def write(self, row: dict[str, Any], name: str, source: str, fill: Any, note: str = "") -> None:
        """One file of the bundle: fill(sink, limit) writes it; the rest of the budget limits it further."""
        limit = min(row["limit"], self.budget)
        if limit < 4096:
            raise MissingError(f"the bundle's total limit was reached before this item ({self.limit_is})", failed=True)
        path = self.staging / name
        before, report = self.redactor.masked, collections.Counter(self.redactor.report)
        sink = Sink(path, self.redactor)
        try:
            fill(sink, limit)
        except (OSError, MissingError):
            sink.file.close()
            path.unlink()
            raise
        sink.close()
        size = path.stat().st_size
        self.budget -= size
        self.entry(
            row,
            name,
            source,
            bytes=size,
            sha256=sink.digest.hexdigest(),
            truncated=bool(sink.cuts),
            reason="; ".join([*sink.cuts, *([self.redactor.text(note)] if note else [])]),
            masked=self.redactor.masked - before,
            masked_as=dict(self.redactor.report - report),
        )

    def take_command(self, row: dict[str, Any], accepted: tuple[int, ...] = (0,)) -> None:
        """What a short command prints."""
        status, output, errors = run(row["what"])
        if not output and (status or errors):
            raise MissingError(
                f"{row['what'][0]} ended with status {status}: {errors[:300]}", failed=not self.is_absent()
            )
        note = "" if status in accepted else f"{row['what'][0]} ended with status {status}: {errors[:300]}"
        self.write(row, row["name"], " ".join(row["what"]), lambda sink, limit: put(sink, output, limit), note)

    def take_script(self, row: dict[str, Any]) -> None:
        """What a program for this Python prints that comes with the row: its name, text and arguments."""
        name, text, *arguments = row["what"]
        status, output, errors = run([sys.executable, "-I", "-", *arguments], text.encode())
        if status:
            raise MissingError(f"{name} ended with status {status}: {errors[-300:]}", failed=True)
        self.write(row, row["name"], name, lambda sink, limit: put(sink, output, limit))

    def take_tool(self, row: dict[str, Any]) -> None:
        """What a command prints that not every host has: that there is none is no fault."""
        if shutil.which(row["what"][0]) is None:
            raise MissingError(f"there is no {row['what'][0]} on this host")
        status, output, errors = run(row["what"])
        if status and not output:
            raise MissingError(f"{row['what'][0]} ended with status {status}: {errors[:300]}")
        self.write(row, row["name"], " ".join(row["what"]), lambda sink, limit: put(sink, output, limit))

    def take_kernel(self, row: dict[str, Any]) -> None:
        """Kernel messages since boot; containers have none of their own, and may not read the node's."""
        for argv in (
            ["journalctl", "--quiet", "--no-pager", "--utc", "--output=short-iso-precise", "-k", "-b"],
            ["dmesg"],
        ):
            with contextlib.suppress(MissingError):
                lines, _ = stream(argv, min(row["limit"], self.budget), keep_end=True)
                if lines:
                    self.write(
                        row, row["name"], " ".join(argv), lambda sink, _, lines=lines: [sink.line(raw) for raw in lines]
                    )
                    return
        raise MissingError("no kernel messages can be read here: those of the node are the node's")

    def take_processes(self, row: dict[str, Any]) -> None:
        """Every process of the unit: state, CPU seconds between two looks, where it waits, and its own environment."""
        if not self.pid:
            raise MissingError("the service is not running")
        if time.monotonic() - self.first_look["at"] < 1:
            time.sleep(1)
        main = process(self.pid)[0]
        second, rows = look(self.pids()), []
        for pid, now in sorted(second["processes"].items()):
            before = self.first_look["processes"].get(pid)
            one = {"pid": pid, **now, "busy": round(now["seconds"] - before["seconds"], 2) if before else None}
            with contextlib.suppress(MissingError, OSError):
                own = process(pid)[0]
                one["differs"] = self.redactor.environment({k: v for k, v in own.items() if main.get(k) != v})
            rows.append(one)
        raw = (json.dumps(self.redactor.data(rows), indent=1) + "\n").encode("utf-8", "surrogateescape")
        self.write(row, row["name"], "/proc", lambda sink, limit: put(sink, raw, limit))

    def take_answers(self, row: dict[str, Any]) -> None:
        """What the server answers to each path, and how long that took."""
        if not self.pid:
            raise MissingError("the service is not running")
        self.server.ask(row["what"][0])
        shown = [{k: v for k, v in one.items() if k != "body"} for one in self.server.answers.values()]
        raw = (json.dumps(shown, indent=1) + "\n").encode()
        self.write(
            row, row["name"], row["what"][0] or self.server.base_url(), lambda sink, limit: put(sink, raw, limit)
        )

    def take_answer(self, row: dict[str, Any]) -> None:
        """The text of one answer."""
        path = row["what"][1]
        self.server.ask(row["what"][0])
        one = self.server.answers[path]
        if one["status"] != 200:
            said = one["error"] or f"answered {one['status']}"
            refused = one["status"] in (400, 401, 403)  # 404: not switched on; no answer at all: answers.json says it
            raise MissingError(f"{path}: {said} after {one['seconds']} s", failed=refused)
        raw = one["body"]
        with contextlib.suppress(ValueError):  # an answer that is no JSON is kept as it came
            raw = (json.dumps(self.redactor.data(json.loads(raw)), indent=1) + "\n").encode()
        self.write(row, row["name"], path, lambda sink, limit: put(sink, raw, limit))

    def take_nccl(self, row: dict[str, Any]) -> None:
        """NCCL's log files: those that were named, and those that the process's NCCL_DEBUG_FILE names."""
        named = [re.sub(r"%[hp]", "*", path) for path in self.named("NCCL_DEBUG_FILE")]
        self.take_files({**row, "what": [*row["what"], *named]})

    def named(self, *variables: str) -> list[str]:
        """Globs of the paths that variables of the process name, there where the process itself sees them."""
        found: dict[str, None] = {}
        if self.pid:
            with contextlib.suppress(MissingError, OSError):
                environment = process(self.pid)[0]
                paths = [environment[name] for name in variables if os.path.isabs(environment.get(name, ""))]
                for path in map(glob.escape, paths):
                    inside = f"/proc/{self.pid}/root{path}"  # its own /tmp is not this one
                    found[path if glob.glob(re.sub(r"%[hp]", "*", path) + "*") else inside] = None
        return list(found)

    def take_flight(self, row: dict[str, Any]) -> None:
        """Flight-recorder dumps as JSON: the pickles that torch writes are read without making any object of them."""
        named = self.named("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
        paths = expand([*row["what"], *(path + "*" for path in named)])
        if not paths:
            raise MissingError("nothing there: " + " ".join(row["what"]))
        for path in paths:
            name = f"{row['name']}/{str(path).lstrip('/')}.json"
            try:
                raw = flight(path, row["limit"])
                self.write(row, name, str(path), lambda sink, limit, raw=raw: put(sink, raw, limit))
            except MissingError as missing:
                self.absent(row, name, str(missing), missing.failed)
            except OSError as error:
                self.absent(row, name, error.strerror or str(error), True)

    def take_dumps(self, row: dict[str, Any]) -> None:
        """Core files and crash dumps as they are: only asked for, for they hold prompts and secrets."""
        paths = expand(row["what"])
        if not paths:
            raise MissingError("nothing there: " + (" ".join(row["what"]) or "not asked for"))
        for path in paths:
            name, size = f"{row['name']}/{str(path).lstrip('/')}", path.lstat().st_size
            if path.is_symlink() or size > min(row["limit"], self.budget):
                self.absent(row, name, f"not copied: {size} bytes are more than the limit, or it is a link", True)
                continue
            target = self.staging / name
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                shutil.copyfile(str(path), str(target))
            except OSError as error:
                self.absent(row, name, error.strerror or str(error), True)
                continue
            self.budget -= size
            self.entry(
                row, name, str(path), bytes=size, sha256=sha256(target), reason="as it is: nothing is masked in it"
            )

    def take_status(self, row: dict[str, Any]) -> None:
        """`systemctl status`, whose exit status says how the unit is, not whether the command worked."""
        self.take_command(row, accepted=(0, 1, 2, 3, 4))

    def take_process(self, row: dict[str, Any]) -> None:
        """Command line, environment, limits and status of the unit's main process."""
        if not self.pid:
            raise MissingError("the service is not running")
        environment, arguments = process(self.pid)
        shown = {
            "cmdline.json": json.dumps(self.redactor.arguments(arguments), indent=1) + "\n",
            "environment.json": json.dumps(self.redactor.environment(environment), indent=1, sort_keys=True) + "\n",
        }
        for name in ("limits", "status", "cgroup"):
            shown[name + ".txt"] = Path(f"/proc/{self.pid}/{name}").read_text(errors="replace")
        for name, text in shown.items():
            raw = text.encode("utf-8", "surrogateescape")
            source = f"/proc/{self.pid}/{name.partition('.')[0].replace('environment', 'environ')}"
            self.write(row, f"{row['name']}/{name}", source, lambda sink, limit, raw=raw: put(sink, raw, limit))

    def take_files(self, row: dict[str, Any]) -> None:
        """Regular files below the given paths; links are named, not followed; what is no text is not copied."""
        paths = expand(row["what"])
        if not paths:
            raise MissingError("nothing there: " + (" ".join(row["what"]) or "no path was given"))
        for path in paths:
            name = f"{row['name']}/{str(path).lstrip('/')}"
            try:
                self.take_file(row, name, path)
            except MissingError as missing:
                self.absent(row, name, str(missing), missing.failed)
            except OSError as error:
                self.absent(row, name, error.strerror or str(error), True)

    def take_file(self, row: dict[str, Any], name: str, path: Path) -> None:
        """One file or link."""
        if path.is_symlink():
            target = f"link to {os.readlink(path)}\n".encode()
            self.write(row, name + ".link", str(path), lambda sink, limit: put(sink, target, limit))
            return
        with path.open("rb") as source:
            head = source.read(4096)
        if b"\0" in head or head.startswith((b"\xff\xfe", b"\xfe\xff")):  # the latter are marks of UTF-16
            raise MissingError(f"not copied: {path.stat().st_size} bytes that are no text")
        self.write(row, name, str(path), lambda sink, limit: copy_file(path, sink, limit))

    def take_list(self, row: dict[str, Any]) -> None:
        """Size, time and name of every file below the given paths."""
        lines = []
        for path in expand(row["what"]):
            found = path.lstat()
            when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(found.st_mtime))
            lines.append(f"{found.st_size:>16} {when} {path}\n")
        if not lines:
            raise MissingError("nothing there: " + " ".join(row["what"]))
        raw = "".join(lines).encode("utf-8", "surrogateescape")
        self.write(row, row["name"], " ".join(row["what"]), lambda sink, limit: put(sink, raw, limit))

    def take_packages(self, row: dict[str, Any]) -> None:
        """Names and versions of the distributions that the engine's interpreter sees."""
        python = row["what"][0]
        if not python and self.pid:
            python = process(self.pid)[1][0]
        if not os.path.isabs(python) or "python" not in os.path.basename(python):
            raise MissingError("the engine's interpreter is not known: the service does not run and none was named")
        self.take_command({**row, "what": [python, "-I", "-c", LIST_PACKAGES]})

    def take_journal(self, row: dict[str, Any]) -> None:
        """The unit's journal since its current start, or before it."""
        unit, part = row["what"]
        started = self.unit.get("InactiveExitTimestamp", "").partition(" ")[2]
        base = ["journalctl", "--quiet", "--no-pager", "--all", "--utc", "--output=short-iso-precise", f"--unit={unit}"]
        if part == "before":
            if not started:
                raise MissingError("the service was not started since boot: all of its journal is in server.log")
            base.append(f"--until={started}")
        elif started:
            base.append(f"--since={started}")
        source = f"journal of {unit}, " + ("before " if part == "before" else "since ") + (started or "the beginning")
        self.write(row, row["name"], source, lambda sink, limit: journal(base, sink, limit, head=part == "current"))
        if not self.entries[-1]["bytes"]:
            (self.staging / row["name"]).unlink()
            self.entries.pop()
            raise MissingError(f"the journal has nothing of {unit} there")

    def is_absent(self) -> bool:
        """Whether the unit does not exist here, which explains every failure about it."""
        return bool(self.request["unit"]) and self.unit.get("LoadState") in (None, "not-found")


def remove(directory: Path) -> None:
    """Remove a directory into which the collector of a killed run may still be writing: under another name first."""
    aside = directory.with_name(directory.name + ".gone")
    directory.rename(aside)
    shutil.rmtree(aside)


def make_staging(directories: list[str], owner: str) -> tuple[Path, int]:
    """A new private directory where there is most room, and the bytes that may be put there."""
    own = f"{PREFIX}{owner}-"
    usable = [name for name in directories if os.path.isdir(name) and os.access(name, os.W_OK)]
    if not usable:
        sys.exit("there is no writable directory for the bundle among " + ", ".join(directories))
    for name in usable:
        for old in Path(name).glob(PREFIX + "*"):
            found = old.lstat()
            dead = old.name.startswith(own) or time.time() - found.st_mtime > STALE_SECONDS
            if dead and stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                remove(old)
    # the first is preferred; another only when it has more than the first can give
    free = {name: shutil.disk_usage(name).free for name in usable}
    best = usable[0] if free[usable[0]] > 4 * KEEP_FREE else max(usable, key=lambda name: free[name])
    room = free[best] - KEEP_FREE if free[best] > 2 * KEEP_FREE else free[best] // 2
    if room < 1 << 16:
        sys.exit(f"no room for a bundle: {best} has {free[best]} bytes free")
    return Path(tempfile.mkdtemp(prefix=own, dir=best)), room


def stop(number: int, _frame: object) -> None:
    """Leave by way of the finally clauses when the connection breaks."""
    sys.exit(f"stopped by signal {number}")


def main() -> None:
    """Collect, print what there is, and leave nothing behind when it fails."""
    if len(sys.argv) != 2:
        sys.exit("usage: collect JSON")
    request = json.loads(sys.argv[1])
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash must not leave the secrets it has read
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, stop)
    staging, room = make_staging(request["directories"], request["owner"])
    done = False
    try:
        collector = Collector(request, staging, room)
        for row in request["rows"]:
            collector.row(row)
        unit = collector.unit
        context = {
            "active": unit.get("ActiveState", "unknown"),
            "loaded": unit.get("LoadState", "unknown"),
            "restarts": unit.get("NRestarts", ""),
            "started": unit.get("ActiveEnterTimestamp", ""),
            "main_pid": collector.pid,
            "kernel": os.uname().release,
            "python": sys.version.partition(" ")[0],
            "utc_offset": time.strftime("%z"),
        }
        answer = {"staging": str(staging), "entries": collector.entries, "context": context}
        print(json.dumps({**answer, "rsync": shutil.which("rsync") is not None}))
        sys.stdout.flush()
        done = True
    finally:
        if not done:
            shutil.rmtree(staging)


main()
