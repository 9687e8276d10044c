"""Collect logs and state of one service into a private directory of this host, secrets masked.

Sent to the host in one piece with `pivot.redact` (see `pivot.bundle.collector`). Standard library only, Python 3.9.
Argument: JSON with ``rows`` (of `pivot.bundle.table`), ``unit``, ``total_limit`` in bytes and what it is,
``directories`` (where the private directory may be made), ``prompts`` (whether texts of requests may stay) and
``owner`` (for whom: what an interrupted run left for the same one goes). Prints one JSON object: ``staging``,
``entries`` (one for each file, or for what is missing with the reason), ``context``.
Exits 1 with one sentence, and leaves nothing behind, when that is impossible.
"""

from __future__ import annotations

import collections
import contextlib
import glob
import hashlib
import http.client
import io
import json
import os
import pickle
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from pivot.redact import MASK, Redactor, secret_name, secret_values

PREFIX = "pivot-bundle-"
STALE_SECONDS = 6 * 3600  # a staging directory this old belongs to a run that died, whoever it was for
TIMEOUT = 60
MAX_LINE = 1 << 20
BLOCK = 1 << 18
KEEP_FREE = 64 << 20
MAX_PROCESSES = 256
PATHS = ("/health", "/model_info", "/server_info", "/metrics")
ASK_SECONDS = 22  # SGLang's own limit for /health is 20
ANSWER_LIMIT = 4 << 20
LIST_PACKAGES = (
    "import importlib.metadata as m, json, sys; "
    "json.dump({'python': sys.version, 'packages': dict(sorted((d.metadata['Name'], d.version) "
    "for d in m.distributions()))}, sys.stdout, indent=1)"
)


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
        text = raw.decode("utf-8", "surrogateescape")
        self.lines.append(text)
        self.pending += len(text)
        if self.pending >= BLOCK:
            inside_key = "-----BEGIN " in text and text.rfind("-----BEGIN ") > text.rfind("-----END ")
            if not inside_key or self.pending >= 4 * BLOCK:
                self.flush()

    def line(self, raw: bytes, cut_end: bool = False) -> None:
        """Add one line; cut_end says that its end is missing, so that its last word may be part of a secret."""
        text = raw.decode("utf-8", "surrogateescape")
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
        self.answers: dict[str, dict[str, Any]] = {}

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
                try:
                    text = path.read_bytes()[: 1 << 20].decode("utf-8", "surrogateescape")
                except OSError:
                    continue  # its own entry will say why
                self.redactor.learn(secret_values(text))
                for name, value in re.findall(r"(?m)^[\"']?(host|port|api[-_]key)[\"']?\s*[:=]\s*(.+?)\s*$", text):
                    settings[name.replace("_", "-")] = scalar(value)
        if self.pid:
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
        return settings

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
        self.ask(row["what"][0])
        shown = [{k: v for k, v in one.items() if k != "body"} for one in self.answers.values()]
        raw = (json.dumps(shown, indent=1) + "\n").encode()
        self.write(row, row["name"], row["what"][0] or self.base_url(), lambda sink, limit: put(sink, raw, limit))

    def take_answer(self, row: dict[str, Any]) -> None:
        """The text of one answer."""
        path = row["what"][1]
        self.ask(row["what"][0])
        one = self.answers[path]
        if one["status"] != 200:
            said = one["error"] or f"answered {one['status']}"
            refused = one["status"] in (400, 401, 403)  # 404: not switched on; no answer at all: answers.json says it
            raise MissingError(f"{path}: {said} after {one['seconds']} s", failed=refused)
        raw = one["body"]
        with contextlib.suppress(ValueError):  # an answer that is no JSON is kept as it came
            raw = (json.dumps(self.redactor.data(json.loads(raw)), indent=1) + "\n").encode()
        self.write(row, row["name"], path, lambda sink, limit: put(sink, raw, limit))

    def ask(self, url: str) -> None:
        """Ask for every path at once: a server that hangs answers none of them."""
        if self.answers:
            return
        url = url or self.base_url()
        threads = [threading.Thread(target=self._ask, args=(url, path), daemon=True) for path in PATHS]
        self.answers = {
            path: {"path": path, "status": None, "seconds": ASK_SECONDS, "error": "no answer"} for path in PATHS
        }
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(ASK_SECONDS + 5)

    def _ask(self, url: str, path: str) -> None:
        request = urllib.request.Request(url + path)  # noqa: S310 - http, and from the service's own settings
        if self.settings.get("api-key"):
            request.add_header("Authorization", "Bearer " + self.settings["api-key"])
        begin = time.monotonic()
        answer: dict[str, Any] = {"path": path, "status": None, "error": "", "body": b""}
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                request, timeout=ASK_SECONDS
            ) as reply:
                answer.update(status=reply.status, body=reply.read(ANSWER_LIMIT))
        except urllib.error.HTTPError as error:
            answer.update(status=error.code, error=str(error.reason))
        except (OSError, ValueError, http.client.HTTPException) as error:
            answer["error"] = self.redactor.text(str(getattr(error, "reason", error)))
        answer["seconds"] = round(time.monotonic() - begin, 1)
        self.answers[path] = answer

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
            binary = b"\0" in source.read(4096)
        if binary:
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

    def base_url(self) -> str:
        """Where the server listens, from its configuration."""
        host, port = self.settings.get("host", "127.0.0.1"), self.settings.get("port")
        if not port:
            raise MissingError("the server's port is in none of the configuration files, and no url was given")
        host = "127.0.0.1" if host == "0.0.0.0" else host  # noqa: S104 - compared, not bound
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

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


def put(sink: Sink, raw: bytes, limit: int) -> None:
    """A short output; cut at a line's end where it is longer than the limit."""
    kept = raw if len(raw) <= limit else raw[: raw.rfind(b"\n", 0, limit) + 1] or raw[:limit]
    for line in kept.splitlines(keepends=True):
        sink.line(line, cut_end=len(kept) < len(raw) and not line.endswith((b"\n", b"\r")))
    if len(kept) < len(raw):
        sink.cut(f"{len(raw) - len(kept)} of {len(raw)} bytes left out")


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
                shutil.rmtree(old)
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
        sys.exit("usage: collect.py JSON")
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
