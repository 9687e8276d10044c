#!/usr/bin/env python3
"""The debug probe's toggle, on the host: look, record the baseline, restore, prove.

One standard-library file for Python 3.9 and later. The role sends it to look, and installs it beside the state so
that it also works without a controller: started without arguments it restores what the state beside it describes,
and the timer that ends a forgotten probe starts it with `expire`, which restarts nothing without consent.
It prints one JSON object and exits with 0, FAILED or DIFFERENT. No secret-looking line leaves it in clear, and no value
of an environment variable but those that name plugins, Python's path and simulated acceptance.

Usage: probe_state.py ['{"do": "look" | "begin" | "on" | "restore", ...}' | expire]
"""

import ast
import calendar
import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Set, Tuple

FORMAT = 2
# exit codes: a sentence stands in the output; the restored service differs from the baseline
FAILED, DIFFERENT = 3, 4
DROPIN = "50-pivot-probe.conf"
SCRIPT = "restore.py"
LOCK = Path("/run/pivot-probe.lock")
UNITS = Path("/etc/systemd/system")
# where systemd remembers when a persistent timer last elapsed
STAMPS = Path("/var/lib/systemd/timers")
# what lies in the directory of the records
RECORDED = ("*.jsonl", "*.safetensors")
PLUGIN = "pivot_probe"
HIDDEN = "sha256:"
GRAPH_OPTION = "--disable-cuda-graph"
# systemd's own messages about a unit, and the line with which SGLang says that it serves
EVENTS = {
    "7d4958e842da4a758f6c1cdc7b36dcc5": "starting",
    "39f53479d3a045ac8e11786248231fbf": "started",
    "de5b426a63be47a7b6ac3eaac82e2f6f": "stopping",
    "9d1aaa27d60140bd96365438aad20286": "stopped",
}
READY = "The server is fired up and ready to roll"
# earlier restarts that are reported, and seconds that looking for them may take in a large journal
EARLIER, JOURNAL_SECONDS = 5, 20
# seconds until a service answers that says nothing else, and until one that answers has recorded its warm-up
READY_SECONDS, RECORD_SECONDS = 3600, 600
SPANS = {"us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "d": 86400, "w": 604800, "month": 2629800, "y": 31557600}
# tenths of a second in which a process may show nothing of itself
CLOSED_TRIES = 100
# systemd gives these anew at every start: they tell nothing about the configuration
PER_START = {
    "INVOCATION_ID",
    "JOURNAL_STREAM",
    "LISTEN_PID",
    "MAINPID",
    "SYSTEMD_EXEC_PID",
    "WATCHDOG_PID",
}
# what `systemctl show` tells of a command's last run, not of its configuration
PER_RUN = re.compile(r"\s*;\s*(ignore_errors|start_time|stop_time|pid|code|status)=[^;}]*")
SECRET = re.compile(r"(?i)key|token|secret|passw|credential")
# options that hold a secret themselves; `--max-total-tokens` and `--tokenizer-path` do not
SECRET_OPTION = re.compile(r"(?i)--[a-z-]*(api-key|password|secret|watermark-key)|[A-Z_]*(KEY|TOKEN|SECRET|PASSWORD)=")
# what a restart has to find as it was; times, counters and process ids are left out
SHOWN = [
    "CacheDirectory",
    "DynamicUser",
    "Environment",
    "EnvironmentFiles",
    "ExecStart",
    "ExecStartPost",
    "FragmentPath",
    "Group",
    "KillMode",
    "LimitNOFILE",
    "LogsDirectory",
    "PrivateDevices",
    "ProtectSystem",
    "ReadOnlyPaths",
    "ReadWritePaths",
    "Restart",
    "RestartUSec",
    "StateDirectory",
    "TimeoutStartUSec",
    "TimeoutStopUSec",
    "Type",
    "UMask",
    "UnitFileState",
    "User",
    "WorkingDirectory",
]
# arguments: directories of the service's PYTHONPATH, which are read and never imported from
ENGINE = """
import importlib.metadata, importlib.util, json, sys
spec = importlib.util.find_spec("sglang")
plugins = {}
for distribution in importlib.metadata.distributions(path=[*sys.argv[1:], *sys.path]):
    for point in distribution.entry_points:
        if point.group == "sglang.srt.plugins":
            plugins.setdefault(point.name, f"{point.value} ({distribution.metadata['Name']} {distribution.version})")
print(json.dumps({
    "version": importlib.metadata.version("sglang"),
    "package": list(spec.submodule_search_locations)[0],
    "plugins": plugins,
}))
"""

Json = Dict[str, Any]
# what the decisions need of the state; what a restore without a controller needs of the settings
PUBLIC = ("phase", "since", "plugins", "pythonpath", "active", "until", "expiry", "expiry_restart", "expired", "asked")
KEPT = ("unit", "python", "root", "records", "state", "config_paths", "ready_url", "ready_timeout")
# the parts of a baseline that only a running service shows
OF_THE_PROCESS = ("command line", "environment", "launch configuration", "plugins")


class Failed(Exception):  # noqa: N818 - it is a sentence for a person, not a programming error
    """Something that a person has to know, in one sentence."""


# --- what is there


def run(*command: str) -> str:
    """A command's standard output; Failed with its last error line when it does not end well."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise Failed(f"{' '.join(command[:3])} ended with {done.returncode}: {lines[-1]}")
    return done.stdout


def show(unit: str, names: List[str]) -> Dict[str, str]:
    """`systemctl show` of a unit, for these properties; a property that is shown several times has several lines."""
    found: Dict[str, str] = {}
    for line in run("systemctl", "show", unit, "--property", ",".join(names)).splitlines():
        name, equals, value = line.partition("=")
        if equals:
            found[name] = f"{found[name]}\n{value}" if name in found else value
    return found


def sha256(data: bytes) -> str:
    """Hexadecimal SHA-256."""
    return hashlib.sha256(data).hexdigest()


def file_sha256(path: Path) -> Optional[str]:
    """The hash of a file's content, None when there is no such file."""
    try:
        return sha256(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None


def process_environment(pid: int) -> Dict[str, str]:
    """The variables a process was started with; empty when it is gone."""
    data, left = None, CLOSED_TRIES
    while data is None:
        try:
            data = Path(f"/proc/{pid}/environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return {}
        except PermissionError:  # of a starting service, between its change of user and its own program
            left -= 1
            if not left:
                raise
            time.sleep(0.1)
    pairs = (item.split("=", 1) for item in os.fsdecode(data).split("\0") if "=" in item)
    return {name: value for name, value in pairs if name not in PER_START}


def process_command(pid: int) -> List[str]:
    """The command line a process was started with; empty when it is gone."""
    try:
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return os.fsdecode(data).split("\0")[:-1]


def engine(python: str, pythonpath: str = "") -> Json:
    """Version, package directory and plugins (name → entry point) of the SGLang that an interpreter imports.

    {"error": …} when it imports none. pythonpath: the service's own, where plugins may lie too.
    """
    try:
        return dict(json.loads(run(python, "-I", "-c", ENGINE, *filter(None, pythonpath.split(":")))))
    except (Failed, OSError, ValueError) as error:
        return {"error": str(error)}


def defined(package: Path, target: str) -> Optional[bool]:
    """Whether a dotted name (package.module.Class.method) is defined in a source tree, without importing it.

    None where that cannot be told: a method that a class may inherit, or a file that this Python cannot read.
    """
    names = target.split(".")
    path = package.parent.joinpath(*names[:-2]).with_suffix(".py")
    try:
        body = ast.parse(path.read_bytes()).body
    except FileNotFoundError:
        return False
    except (OSError, SyntaxError, ValueError):
        return None
    owner = next((node for node in body if isinstance(node, ast.ClassDef) and node.name == names[-2]), None)
    if owner is None:
        return False
    methods = [node.name for node in owner.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return True if names[-1] in methods else None if owner.bases else False


def tree(package: Path) -> Json:
    """The hash of a source tree: of its sorted "relative path, NUL, hash" lines, without compiled files."""
    lines = [
        f"{path.relative_to(package)}\0{sha256(path.read_bytes())}\n"
        for path in package.rglob("*")
        if "__pycache__" not in path.parts and path.is_file()
    ]
    return {"files": len(lines), "sha256": sha256("".join(sorted(lines)).encode())}


def config_path(command: List[str]) -> Optional[str]:
    """The file that `--config` names on a command line."""
    for index, word in enumerate(command):
        if word == "--config" and index + 1 < len(command):
            return command[index + 1]
        if word.startswith("--config="):
            return word.split("=", 1)[1]
    return None


def exec_start(unit_text: str) -> Json:
    """The unit's own ExecStart: its text, or why it cannot be used. Lines after an empty one count, as in systemd, and
    comments do not, even between the lines of one command."""
    joined = re.sub(r"\\\n\s*", " ", re.sub(r"(?m)^[ \t]*[#;].*\n?", "", unit_text))
    values: List[str] = []
    for line in joined.splitlines():
        match = re.match(r"\s*ExecStart\s*=\s*(.*)$", line)
        if match:
            values = [*values, match.group(1)] if match.group(1) else []
    if len(values) != 1:
        return {"error": f"it has {len(values)} ExecStart lines"}
    if SECRET_OPTION.search(values[0]):
        return {"error": "its ExecStart seems to hold a secret, which would be copied into the drop-in"}
    return {"text": values[0]}


# --- the journal


def events(unit: str, since: float = 0.0) -> List[Tuple[float, str]]:
    """When a unit was starting, started, stopping, stopped and ready, by its journal: (unix time, word), in order.

    Empty where the journal does not tell; since: unix time.
    """
    begin = f"--since=@{int(since)}"
    ids = [f"MESSAGE_ID={number}" for number in EVENTS]
    own = _journal(begin, "--lines=400", "_PID=1", f"UNIT={unit}", *ids)
    ready = _journal(begin, "--lines=20", f"_SYSTEMD_UNIT={unit}", "--case-sensitive=true", f"--grep={READY}")
    found = [(when, EVENTS[number]) for when, number in own if number in EVENTS]
    return sorted([*found, *((when, "ready") for when, _ in ready)])


def _journal(*arguments: str) -> List[Tuple[float, str]]:
    """Times and message ids of journal entries; a journal without such entries, or too large a one, has none."""
    command = ["journalctl", "--quiet", "--output=json", "--output-fields=MESSAGE_ID", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=JOURNAL_SECONDS)
        entries = [json.loads(line) for line in done.stdout.splitlines()]
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return []
    return [(int(entry["__REALTIME_TIMESTAMP"]) / 1e6, str(entry.get("MESSAGE_ID"))) for entry in entries]


def restart_seconds(found: List[Tuple[float, str]]) -> List[float]:
    """How long each restart among a unit's events took, in order: its stop, then from its start until it served.

    A start that did not come to serve is none. Where SGLang's own line is missing, what systemd waited for counts.
    """
    seconds: List[float] = []
    begin, stop, stopping, end = 0.0, 0.0, 0.0, 0.0

    def finish() -> None:
        if begin and end - begin >= 1:
            seconds.append(round(stop + end - begin, 1))

    for when, word in found:
        if word == "stopping":
            finish()
            begin, stop, stopping = 0.0, 0.0, when
        elif word == "stopped":
            stop = when - stopping if stopping else 0.0
        elif word == "starting":
            finish()
            stop = stop if stopping else 0.0  # it came down by itself
            begin, stopping, end = when, 0.0, 0.0
        elif word == "started" and not begin:
            begin, stopping, end = when, 0.0, 0.0
        elif begin:
            end = max(end, when)
    finish()
    return seconds[-EARLIER:]


def starts(unit: str, since: float) -> int:
    """How often systemd started a unit since then, by the journal; -1 where that holds nothing of systemd."""
    with contextlib.suppress(Failed, OSError):  # an older journalctl has no --sync: the message is there in a moment
        run("journalctl", "--sync")
    if not _journal("--lines=1", "_PID=1"):
        return -1
    return sum(word == "started" for _, word in events(unit, since))


# --- hiding


def hidden(text: str, salt: str) -> str:
    """A stand-in that is equal for equal texts and tells nothing else."""
    return HIDDEN + sha256(f"{salt}\0{text}".encode())[:32]


def redacted_lines(text: str, salt: str) -> List[str]:
    """A text's lines; one that looks like it holds a secret is replaced."""
    return [hidden(line, salt) if SECRET.search(line) else line for line in text.splitlines()]


def redacted_command(command: List[str], salt: str) -> List[str]:
    """A command line whose secret-looking values are replaced: of ``--name value`` and of ``--name=value``."""
    words = []
    for before, word in zip(["", *command], command):  # noqa: B905 - Python 3.9
        option = before if before.startswith("-") and "=" not in before else ""
        secret = SECRET.search(word if "=" in word else option)
        words.append(hidden(word, salt) if secret else word)
    return words


def snapshot(settings: Json, salt: str) -> Json:
    """Everything that a restore has to bring back, hidden where needed; the probe's own drop-in is left out of it."""
    unit = settings["unit"]
    facts = show(unit, [*SHOWN, "MainPID", "DropInPaths"])
    pid = int(facts.pop("MainPID", "0"))
    dropins = [path for path in facts.pop("DropInPaths", "").split() if Path(path).name != DROPIN]
    facts = {name: PER_RUN.sub("", value) for name, value in facts.items()}
    command, variables = process_command(pid), process_environment(pid)
    paths = [*settings.get("config_paths", []), *filter(None, [config_path(command)])]
    found = engine(settings["python"], variables.get("PYTHONPATH", ""))
    plugins = {name: value for name, value in [("SGLANG_PLUGINS", variables.get("SGLANG_PLUGINS"))] if value}
    plugins.update(found.pop("plugins", {}))
    if "package" in found:
        found.update(tree(Path(found["package"])))
    return {
        "unit": redacted_lines(_unit_without_dropin(unit), salt),
        "drop-ins": {path: file_sha256(Path(path)) for path in dropins},
        "settings": {name: hidden(value, salt) if SECRET.search(value) else value for name, value in facts.items()},
        "command line": redacted_command(command, salt),
        "environment": {name: hidden(value, salt) for name, value in variables.items()},
        "launch configuration": {path: file_sha256(Path(path)) for path in sorted(set(paths))},
        "engine": found,
        "plugins": plugins,
    }


def differences(before: Json, after: Json) -> List[Json]:
    """What two snapshots disagree in: {"part", "item", "before", "after"}; values as they stand in the snapshots."""
    found: List[Json] = []
    for part in before:
        one, other = before[part], after.get(part)
        if not isinstance(one, dict) or not isinstance(other, dict):
            one, other = _numbered(one), _numbered(other)
        found.extend(
            {"part": part, "item": item, "before": one.get(item), "after": other.get(item)}
            for item in sorted({*one, *other})
            if one.get(item) != other.get(item)
        )
    return found


def _numbered(lines: Any) -> Dict[str, Any]:
    return {f"line {number}": line for number, line in enumerate(lines or [], 1)}


def other_changes(before: Json, after: Json, graphs_off: bool) -> List[Json]:
    """Differences between the baseline and the service with the probe that the probe itself does not bring."""
    return [item for item in differences(before, after) if not _brought(item, graphs_off)]


def _brought(item: Json, graphs_off: bool) -> bool:
    """Whether a difference is one of the probe's own: something added, and nothing of what was there taken away."""
    part, name, one, other = (item[key] for key in ("part", "item", "before", "after"))
    if part == "environment":
        return name.startswith("PIVOT_PROBE_") or name in ("PYTHONPATH", "SGLANG_PLUGINS")
    if part == "plugins":
        named = name == "SGLANG_PLUGINS" and one is not None
        return _names(other) == _names(one) | {PLUGIN} if named else name == PLUGIN and one is None
    if part == "command line":
        return graphs_off and one is None and other == GRAPH_OPTION
    if part == "settings" and name in ("EnvironmentFiles", "ReadWritePaths"):
        return (one or "").startswith(HIDDEN) or set((one or "").split()) <= set((other or "").split())
    return part == "settings" and name == "ExecStart" and graphs_off


def _names(text: Optional[str]) -> Set[str]:
    return {name.strip() for name in (text or "").split(",") if name.strip()}


# --- looking


def dropin_path(unit: str) -> Path:
    """Where the probe's drop-in of a unit lies."""
    return UNITS / f"{unit}.d" / DROPIN


def expiry_name(unit: str) -> str:
    """The name, without suffix, of the timer and the service that end the probe of a unit."""
    return "pivot-probe-" + unit.rpartition(".")[0].replace("@", "-")


def expiry_paths(unit: str) -> Dict[str, Path]:
    """Where these two lie: "timer" and "service"."""
    return {kind: UNITS / f"{expiry_name(unit)}.{kind}" for kind in ("timer", "service")}


def look(settings: Json) -> Json:
    """The facts that the decision needs; changes nothing."""
    unit, root, records = settings["unit"], Path(settings["root"]), Path(settings["records"])
    facts = show(unit, ["ActiveState", "LoadState", "MainPID", "NeedDaemonReload", "Type"])
    pid = int(facts.get("MainPID", "0"))
    loaded = facts.get("LoadState") == "loaded"
    variables = process_environment(pid) if pid else {}
    timer = expiry_name(unit) + ".timer"
    found = engine(settings["python"])
    if "package" in found:
        found["hooks"] = {name: defined(Path(found["package"]), name) for name in settings.get("targets", [])}
    return {
        "now": utc(time.time()),
        "interpreter": sys.executable or "/usr/bin/python3",
        "unit": {
            "loaded": loaded,
            "active": facts.get("ActiveState", "unknown"),
            "stale": facts.get("NeedDaemonReload") == "yes",
            "restarts": restart_seconds(events(unit)) if loaded else [],
            "pid": pid,
            "exec_start": exec_start(_unit_without_dropin(unit)) if loaded else {"error": "no such unit"},
            **_owner(Path(f"/proc/{pid}") if pid else None),
        },
        "process": {
            "plugins": variables.get("SGLANG_PLUGINS"),
            "pythonpath": variables.get("PYTHONPATH"),
            "records": variables.get("PIVOT_PROBE_DIR"),
            "until": variables.get("PIVOT_PROBE_UNTIL"),
            "simulated": {name: value for name, value in variables.items() if name.startswith("SGLANG_SIMULATE_")},
        },
        "engine": found,
        "installed": {
            "root": root.is_dir(),
            "files": _files(root),
            "dropin": file_sha256(dropin_path(unit)),
            "expiry": {kind: file_sha256(path) for kind, path in expiry_paths(unit).items()},
            "timer": show(timer, ["ActiveState"]).get("ActiveState") == "active",
            "script": Path(settings["state"]).with_name(SCRIPT).exists(),
        },
        "records": {
            "exists": records.is_dir(),
            "files": len(list(records.glob("*.jsonl"))),
            "free": _free(records),
            **_owner(records if records.is_dir() else None),
        },
        "state": _public_state(Path(settings["state"])),
        "neighbours": _neighbours(unit, root, records),
    }


def _neighbours(unit: str, *places: Path) -> List[str]:
    """Other units whose drop-in of the probe names one of these directories."""
    words = "|".join(re.escape(str(place)) for place in places)
    found = []
    for path in UNITS.glob(f"*.d/{DROPIN}"):
        with contextlib.suppress(OSError):  # it is switched off at this moment
            if path != dropin_path(unit) and re.search(rf"=-({words})(/|$)", path.read_text("utf-8"), re.MULTILINE):
                found.append(path.parent.name[: -len(".d")])
    return sorted(found)


def _unit_without_dropin(unit: str) -> str:
    """`systemctl cat` without the probe's own drop-in."""
    text, own = [], False
    for line in run("systemctl", "cat", unit).splitlines():
        if line.startswith("# /"):
            own = line.endswith(f"/{DROPIN}")
        if not own:
            text.append(line)
    return "\n".join(text).rstrip("\n")


def _free(path: Path) -> int:
    """Bytes that are free where a directory lies or would be made."""
    return shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free


def _owner(path: Optional[Path]) -> Json:
    """uid, gid and mode of a path, None where there is none."""
    try:
        found = path.stat() if path else None
    except FileNotFoundError:
        found = None
    if found is None:
        return {"uid": None, "gid": None, "mode": None}
    return {"uid": found.st_uid, "gid": found.st_gid, "mode": f"{found.st_mode & 0o7777:04o}"}


def _files(root: Path) -> Dict[str, Optional[str]]:
    """Relative path → hash of every file below a directory, without compiled ones."""
    return {
        str(path.relative_to(root)): file_sha256(path)
        for path in sorted(root.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


# --- the state


def read_state(path: Path) -> Optional[Json]:
    """The state file, None when there is none; Failed when it is no state file."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise Failed(f"{path} is no state file of the probe ({error}): look at it and remove it by hand") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise Failed(f"{path} is a state file of another version: restore with the Pivot that wrote it")
    return state


def utc(moment: float) -> str:
    """A unix time as ``2026-11-29T20:00:00Z``."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))


def moment(text: str) -> float:
    """The inverse of `utc`."""
    return float(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ")))


def write_state(path: Path, state: Json) -> None:
    """Replace the state file in one step, readable by root alone."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = path.with_suffix(".new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        json.dump(state, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    fresh.replace(path)


def _public_state(path: Path) -> Json:
    """The part of the state that decisions need: phase "off" when there is none."""
    state = read_state(path)
    if state is None:
        return {"phase": "off"}
    return {**{name: state[name] for name in PUBLIC}, "unit": state["settings"]["unit"]}


def begin(settings: Json) -> Json:
    """Record the baseline unless there is one, set the timer, then lay out the probe's files.

    On stdin {"files": the probe's, "units": {"timer", "service"}: what ends it, "asked": answers without the probe}.
    """
    given = json.load(sys.stdin)
    path, records, unit = Path(settings["state"]), Path(settings["records"]), settings["unit"]
    facts, state = look(settings), read_state(path)
    session = {name: settings[name] for name in ("until", "expiry", "expiry_restart")}
    session.update(settings={name: settings[name] for name in KEPT}, timer=expiry_name(unit) + ".timer", expired=None)
    if state is None:
        salt = secrets.token_hex(16)
        state = {
            "format": FORMAT,
            "phase": "begun",
            "since": utc(time.time()),
            "plugins": facts["process"]["plugins"],
            "pythonpath": facts["process"]["pythonpath"],
            "active": facts["unit"]["active"] == "active",
            "dropin_directory": dropin_path(unit).parent.is_dir(),
            "asked": given.get("asked") or None,
            "salt": salt,
            "baseline": snapshot(settings, salt),
        }
        write_state(path, {**state, **session})
        _set_aside(records)
    elif any(state.get(name) != value for name, value in session.items()):
        write_state(path, {**state, **session, "phase": "begun"})
    _set_timer(unit, given["units"])
    _make_directory(dropin_path(unit).parent, 0o755)
    _make_directory(records, 0o750)
    if facts["unit"]["uid"] is not None:
        os.chown(records, facts["unit"]["uid"], facts["unit"]["gid"])
    _lay_out(Path(settings["root"]), given["files"])
    _count_anew(unit)
    return {"changed": True}


def _count_anew(unit: str) -> None:
    """Its start limit is for crash loops: a start that a person wants is none too many, and begins a new count."""
    with contextlib.suppress(Failed):  # it is not loaded, and has no count
        run("systemctl", "reset-failed", unit)


def _set_timer(unit: str, texts: Dict[str, str]) -> None:
    """Write and start what ends the probe, also after a reboot and without a controller."""
    for kind, path in expiry_paths(unit).items():
        fresh = path.with_suffix(path.suffix + ".new")  # systemd reads no file of that name
        fresh.write_text(texts[kind], encoding="utf-8")
        fresh.chmod(0o644)
        fresh.replace(path)
    run("systemctl", "daemon-reload")
    run("systemctl", "enable", "--quiet", expiry_name(unit) + ".timer")
    run("systemctl", "restart", expiry_name(unit) + ".timer")


def _remove_timer(unit: str) -> None:
    """Stop and remove what ends the probe; it may be this very process that the timer has started."""
    timer, paths = expiry_name(unit) + ".timer", expiry_paths(unit)
    if not _timer_left(unit):
        return
    with contextlib.suppress(Failed):  # its file is half-written or gone already
        run("systemctl", "disable", "--quiet", "--now", timer)
    service = paths["service"].name
    if int(show(service, ["MainPID"]).get("MainPID", "0")) != os.getpid():
        with contextlib.suppress(Failed):  # it never ran
            run("systemctl", "stop", service)  # it may be about to try again
    for path in (*_timer_files(unit), STAMPS / f"stamp-{timer}"):
        _remove(path)
    run("systemctl", "daemon-reload")
    with contextlib.suppress(Failed):  # it has not failed
        run("systemctl", "reset-failed", timer, service)


def _timer_files(unit: str) -> List[Path]:
    paths = list(expiry_paths(unit).values())
    link = UNITS / "timers.target.wants" / f"{expiry_name(unit)}.timer"
    return [*paths, *(path.with_suffix(path.suffix + ".new") for path in paths), link]


def _timer_left(unit: str) -> bool:
    return any(path.exists() or path.is_symlink() for path in _timer_files(unit))


def _make_directory(path: Path, mode: int) -> None:
    """Make a directory with exactly this mode; its mode is left alone when it is there."""
    if not path.is_dir():
        path.mkdir(parents=True)
        path.chmod(mode)


def _lay_out(root: Path, files: Dict[str, str]) -> None:
    """Make a directory hold these files (relative path → content) and no others, readable by everybody."""
    for path in [path for path in root.rglob("*") if not path.is_dir()]:
        if str(path.relative_to(root)) not in files:
            path.unlink()
    for name, content in files.items():
        path = root / name
        for parent in (root, path.parent):
            _make_directory(parent, 0o755)
        path.write_text(content, encoding="utf-8")
        path.chmod(0o644)


def _set_aside(records: Path) -> None:
    """Move records of an earlier session below `previous`, in place of those of the session before it."""
    old = sorted(path for pattern in RECORDED for path in records.glob(pattern))
    if not old:
        return
    previous = records / "previous"
    shutil.rmtree(previous, ignore_errors=True)  # absent the first time
    previous.mkdir(mode=0o750)
    for path in old:
        path.replace(previous / path.name)


def switched_on(settings: Json) -> Json:
    """Note that the service runs with the probe, once it does: it answers, and a process of it has begun to record.

    Answers how often it was started since the baseline, and what else than the probe differs from that.
    """
    path, unit, records = Path(settings["state"]), settings["unit"], Path(settings["records"])
    state = read_state(path)
    if state is None:
        raise Failed(f"{path} is gone: the baseline is lost, switch debugging off")
    seconds, url = float(settings.get("ready_timeout") or READY_SECONDS), settings.get("ready_url") or ""
    _wait(unit, url, seconds)
    seconds = min(seconds, RECORD_SECONDS) if url else seconds  # without one it may still load its weights
    end = time.monotonic() + seconds
    while not any(records.glob("*.jsonl")):
        if show(unit, ["ActiveState"])["ActiveState"] not in ("active", "activating"):
            raise Failed(f"{unit} ended after its restart with the probe: read its log")
        if time.monotonic() > end:
            raise Failed(f"{unit} runs, but wrote no record in {seconds:.0f} s: look for pivot_probe in its log")
        time.sleep(0.5)
    if process_environment(int(show(unit, ["MainPID"])["MainPID"])).get("PIVOT_PROBE_DIR") != str(records):
        raise Failed(f"{unit} runs without PIVOT_PROBE_DIR: something of the unit's own overrides the drop-in")
    if state["phase"] != "on":
        write_state(path, {**state, "phase": "on"})
    dropin = dropin_path(unit).read_text(encoding="utf-8")
    after = snapshot(state["settings"], state["salt"])
    return {
        "changed": True,
        "starts": starts(unit, moment(state["since"])),
        "others": other_changes(state["baseline"], after, "ExecStart=" in dropin),
    }


# --- restoring


def restore(settings: Json) -> Json:
    """Take the probe away and prove that everything is as it was: {"differences": […]}, an empty list when it is.

    May be interrupted and run again at any point: the state file goes last. A service that is down, and ran at the
    baseline, is started, unless "start" is false: then what only a running one shows is not compared.
    """
    path, unit = Path(settings["state"]), settings["unit"]
    state = read_state(path)
    if not _traces(settings):
        return {"changed": False, "restarted": False, "baseline": None, "compared": {}, "differences": []}
    may_restart = bool(settings.get("allow_restart", True))
    _settle(unit, float(settings.get("ready_timeout") or READY_SECONDS), restarting=may_restart)
    need = _need(unit, state)
    if (need == "restart" or (need and settings.get("start", True))) and not may_restart:
        what = "runs with the probe" if need == "restart" else "is down"
        raise Failed(f"{unit} {what}, and debug_probes_allow_restart is false: nothing was changed")
    if state is not None:
        with contextlib.suppress(OSError):  # records that filled the disk must not keep the probe on
            write_state(path, {**state, "phase": "restoring"})
    dropin, root, records = dropin_path(unit), Path(settings["root"]), Path(settings["records"])
    _remove(dropin)
    if state is None or not state["dropin_directory"]:
        with contextlib.suppress(OSError):  # other drop-ins came to lie there, or it was never made
            dropin.parent.rmdir()
    run("systemctl", "daemon-reload")
    need = need if need == "restart" else _need(unit, state)
    restarted = need == "restart" or (need == "start" and bool(settings.get("start", True)))
    if restarted:
        _count_anew(unit)
        run("systemctl", "restart", unit)
        _wait(unit, settings.get("ready_url") or "", float(settings.get("ready_timeout") or READY_SECONDS))
    shutil.rmtree(root, ignore_errors=True)
    if root.exists():
        raise Failed(f"{root} could not be removed")
    if settings.get("remove_records"):
        shutil.rmtree(records, ignore_errors=True)
    _remove_timer(unit)
    return _proven(settings, state, restarted)


def _proven(settings: Json, state: Optional[Json], restarted: bool) -> Json:
    """Compare with the baseline, and forget it unless something differs: the last step of a restore."""
    path, unit = Path(settings["state"]), settings["unit"]
    before: Json = {} if state is None else dict(state["baseline"])
    if state is not None and not int(show(unit, ["MainPID"]).get("MainPID", "0")):
        before = {part: items for part, items in before.items() if part not in OF_THE_PROCESS}
    found = [] if state is None else differences(before, snapshot(state["settings"], state["salt"]))
    result = {
        "changed": True,
        "restarted": restarted,
        "baseline": None if state is None else state["since"],
        "starts": -1 if state is None else starts(unit, moment(state["since"])),
        "compared": {part: _size(items) for part, items in before.items()},
        "differences": found,
    }
    if not found or settings.get("accept_differences"):
        for leftover in (path, path.with_suffix(".new"), path.with_name(SCRIPT)):
            _remove(leftover)
        with contextlib.suppress(OSError):  # the directory may hold what is not ours, or not exist
            path.parent.rmdir()
    return result


def expire(settings: Json) -> Json:
    """What the timer asks for: the restore. Without consent to a restart a running service is left as it is, with a
    probe that has stopped recording by itself; one that is down is restored without being started."""
    path, unit = Path(settings["state"]), settings["unit"]
    state = read_state(path)
    if state is None:  # switched off while this one waited for the lock
        return {"changed": False}
    consent = bool(state["expiry_restart"])
    _settle(unit, float(settings.get("ready_timeout") or READY_SECONDS), restarting=consent)
    if _need(unit, state) == "restart" and not consent:
        with contextlib.suppress(OSError):  # a full disk: the time of expiry stands in the state anyway
            write_state(path, {**state, "expired": utc(time.time())})
        text = f"recording has stopped; {unit} keeps the probe until debug-off, because a restart was not consented to"
        return {"changed": False, "kept": text}
    # somebody who stopped the service meanwhile has not asked for its start; one that failed was to run
    start = consent and show(unit, ["ActiveState"]).get("ActiveState") != "inactive"
    return restore({**settings, "allow_restart": consent, "start": start})


def _size(items: Any) -> int:
    """How many things a part of the baseline holds: files of the engine, otherwise lines or names."""
    return int(items["files"]) if "sha256" in items else len(items)


def _traces(settings: Json) -> bool:
    """Whether anything of the probe is left; another restore may have ended while this one waited for the lock."""
    left = (Path(settings["state"]), Path(settings["root"]), dropin_path(settings["unit"]))
    pid = int(show(settings["unit"], ["MainPID"]).get("MainPID", "0"))
    script = Path(settings["state"]).with_name(SCRIPT)
    if any(path.exists() for path in (*left, script)) or _timer_left(settings["unit"]):
        return True
    return "PIVOT_PROBE_DIR" in process_environment(pid)


def _settle(unit: str, seconds: float, *, restarting: bool) -> None:
    """Until a start or a stop that is under way, perhaps of an interrupted switch, has come to its end.

    seconds: to wait at least; longer where the unit allows itself more. restarting: a start with the probe is about to
    be replaced by one without, so that nobody waits for it.
    """
    facts = show(unit, ["TimeoutStartUSec", "TimeoutStopUSec"])
    seconds = max(seconds, sum(map(time_span, facts.values())))
    end = time.monotonic() + seconds
    while True:
        active = show(unit, ["ActiveState"]).get("ActiveState")
        if active not in ("activating", "deactivating", "reloading"):
            return
        if restarting and active == "activating" and _with_probe(unit):
            return
        if time.monotonic() > end:
            raise Failed(f"{unit} has been starting or stopping for {seconds:.0f} s: look at it first")
        time.sleep(0.5)


def time_span(text: str) -> float:
    """Seconds of a time as `systemctl show` writes it, such as ``1h 30min``; 0 for ``infinity``."""
    return sum(float(number) * SPANS[unit] for number, unit in re.findall(r"([\d.]+)\s*([a-z]+)", text))


def _with_probe(unit: str) -> bool:
    """Whether what runs, or is about to be started again, has the probe."""
    pid = int(show(unit, ["MainPID"]).get("MainPID", "0"))
    return "PIVOT_PROBE_DIR" in process_environment(pid) if pid else dropin_path(unit).exists()


def _need(unit: str, state: Optional[Json]) -> str:
    """What a restore needs: "restart" where the probe runs, "start" where a service that ran is down, or no text."""
    facts = show(unit, ["ActiveState", "MainPID"])
    if (int(facts.get("MainPID", "0")) or facts.get("ActiveState") == "activating") and _with_probe(unit):
        return "restart"
    down = facts.get("ActiveState") in ("failed", "inactive")
    return "start" if down and state is not None and state["active"] else ""


def _wait(unit: str, url: str, seconds: float) -> None:
    """Until the service answers 200; without a URL `systemctl restart` has waited already."""
    if not url:
        return
    end = time.monotonic() + seconds
    while True:
        # refused: not up yet; an HTTP error: up and not ready (503)
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - the role checks it
            if answer.status == 200:
                return
        if show(unit, ["ActiveState"]).get("ActiveState") in ("failed", "inactive"):
            raise Failed(f"{unit} ended after its restart: read its log (journalctl -u {unit})")
        if time.monotonic() > end:
            raise Failed(f"{url} did not answer 200 within {seconds:.0f} s of the restart")
        time.sleep(1)


def _remove(path: Path) -> None:
    """Remove a file that may be gone already."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


@contextlib.contextmanager
def alone(verb: str) -> Iterator[None]:
    """Only one switch at a time on this host: one that lost its controller may still be at work, and looking waits too
    until it has come to its end, since what is in between tells nothing."""
    if verb == "look" and not LOCK.exists():  # nothing was ever switched since the host came up
        yield
        return
    with LOCK.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_SH if verb == "look" else fcntl.LOCK_EX)
        yield


def _kept_settings() -> Optional[Json]:
    """The settings in the state beside this file, None when there is no state."""
    beside = Path(__file__).resolve().parent
    found = [state for state in map(read_state, sorted(beside.glob("*.json"))) if state is not None]
    return dict(found[0]["settings"]) if found else None


def main() -> int:
    """Do what the argument asks; without one, restore what the state beside this file describes."""
    verbs = {"look": look, "begin": begin, "on": switched_on, "restore": restore, "expire": expire}
    try:
        if sys.argv[1:] not in ([], ["expire"]):
            settings = json.loads(sys.argv[1])
        else:
            settings = _kept_settings()
            if settings is None:
                print(json.dumps({"changed": False}))
                return 0
            settings["do"] = "expire" if sys.argv[1:] else "restore"
        with alone(settings["do"]):
            result = verbs[settings["do"]](settings)
    except (Failed, OSError) as error:  # an OSError: a full disk, for example
        text = str(error)
        if isinstance(error, OSError):
            text = f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"
        print(json.dumps({"failed": text}))
        return FAILED
    print(json.dumps(result))
    return DIFFERENT if result.get("differences") and not settings.get("accept_differences") else 0


if __name__ == "__main__":
    sys.exit(main())
