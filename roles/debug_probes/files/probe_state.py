#!/usr/bin/env python3
"""The debug probe's toggle, on the host: look, record the baseline, restore, prove.

One standard-library file for Python 3.9 and later. The role sends it to look, and installs it beside the state so
that it also works without a controller: started without arguments it restores what the state beside it describes.
It prints one JSON object and exits with 0, FAILED or DIFFERENT. No value of an environment variable and no
secret-looking line leaves it in clear.

Usage: probe_state.py ['{"do": "look" | "begin" | "on" | "restore", ...}']
"""

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
from typing import Any, Dict, Iterator, List, Optional

FORMAT = 1
# exit codes: a sentence stands in the output; the restored service differs from the baseline
FAILED, DIFFERENT = 3, 4
DROPIN = "50-pivot-probe.conf"
SCRIPT = "restore.py"
LOCK = Path("/run/pivot-probe.lock")
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
ENGINE = """
import importlib.metadata, importlib.util, json
spec = importlib.util.find_spec("sglang")
print(json.dumps({
    "version": importlib.metadata.version("sglang"),
    "package": list(spec.submodule_search_locations)[0],
}))
"""

Json = Dict[str, Any]


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
    """`systemctl show` of a unit, for these properties."""
    text = run("systemctl", "show", unit, "--property", ",".join(names))
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


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
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    pairs = (item.split("=", 1) for item in os.fsdecode(data).split("\0") if "=" in item)
    return {name: value for name, value in pairs if name not in PER_START}


def process_command(pid: int) -> List[str]:
    """The command line a process was started with; empty when it is gone."""
    try:
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return os.fsdecode(data).split("\0")[:-1]


def engine(python: str) -> Json:
    """Version and package directory of the SGLang that an interpreter imports; {"error": …} when it imports none."""
    try:
        return dict(json.loads(run(python, "-I", "-c", ENGINE)))
    except (Failed, OSError, ValueError) as error:
        return {"error": str(error)}


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
    """The unit's own ExecStart: its text, or why it cannot be used. Lines after an empty one count, as in systemd."""
    joined = re.sub(r"\\\n\s*", " ", unit_text)
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


# --- hiding


def hidden(text: str, salt: str) -> str:
    """A stand-in that is equal for equal texts and tells nothing else."""
    return "sha256:" + sha256(f"{salt}\0{text}".encode())[:32]


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
    """Everything that a restore has to bring back, hidden where needed."""
    unit = settings["unit"]
    facts = show(unit, [*SHOWN, "MainPID", "DropInPaths"])
    pid = int(facts.pop("MainPID", "0"))
    dropins = [path for path in facts.pop("DropInPaths", "").split() if Path(path).name != DROPIN]
    facts = {name: PER_RUN.sub("", value) for name, value in facts.items()}
    command = process_command(pid)
    paths = [*settings.get("config_paths", []), *filter(None, [config_path(command)])]
    found = engine(settings["python"])
    if "package" in found:
        found.update(tree(Path(found["package"])))
    return {
        "unit": redacted_lines(run("systemctl", "cat", unit), salt),
        "drop-ins": {path: file_sha256(Path(path)) for path in dropins},
        "settings": {name: hidden(value, salt) if SECRET.search(value) else value for name, value in facts.items()},
        "command line": redacted_command(command, salt),
        "environment": {name: hidden(value, salt) for name, value in process_environment(pid).items()},
        "launch configuration": {path: file_sha256(Path(path)) for path in sorted(set(paths))},
        "engine": found,
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


# --- looking


def dropin_path(unit: str) -> Path:
    """Where the probe's drop-in of a unit lies."""
    return Path("/etc/systemd/system") / f"{unit}.d" / DROPIN


def look(settings: Json) -> Json:
    """The facts that the decision needs; changes nothing."""
    unit, root, records = settings["unit"], Path(settings["root"]), Path(settings["records"])
    facts = show(unit, ["ActiveState", "LoadState", "MainPID", "Type"])
    pid = int(facts.get("MainPID", "0"))
    loaded = facts.get("LoadState") == "loaded"
    variables = process_environment(pid) if pid else {}
    return {
        "unit": {
            "loaded": loaded,
            "active": facts.get("ActiveState", "unknown"),
            "pid": pid,
            "exec_start": exec_start(_unit_without_dropin(unit)) if loaded else {"error": "no such unit"},
            **_owner(Path(f"/proc/{pid}") if pid else None),
        },
        "process": {
            "plugins": variables.get("SGLANG_PLUGINS"),
            "pythonpath": variables.get("PYTHONPATH"),
            "records": variables.get("PIVOT_PROBE_DIR"),
        },
        "engine": engine(settings["python"]),
        "installed": {
            "root": root.is_dir(),
            "files": _files(root),
            "dropin": file_sha256(dropin_path(unit)),
            "script": Path(settings["state"]).with_name(SCRIPT).exists(),
        },
        "records": {
            "exists": records.is_dir(),
            "files": len(list(records.glob("*.jsonl"))),
            **_owner(records if records.is_dir() else None),
        },
        "state": _public_state(Path(settings["state"])),
    }


def _unit_without_dropin(unit: str) -> str:
    """`systemctl cat` without the probe's own drop-in."""
    text, own = [], False
    for line in run("systemctl", "cat", unit).splitlines():
        if line.startswith("# /"):
            own = line.endswith(f"/{DROPIN}")
        if not own:
            text.append(line)
    return "\n".join(text)


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
    return {name: state[name] for name in ("phase", "since", "plugins", "pythonpath")}


def begin(settings: Json) -> Json:
    """Record the baseline unless there is one, then lay out the probe's files, which come as JSON on stdin."""
    files = json.load(sys.stdin)
    path, records = Path(settings["state"]), Path(settings["records"])
    facts = look(settings)
    if read_state(path) is None:
        salt = secrets.token_hex(16)
        names = ("unit", "python", "root", "records", "state", "config_paths", "ready_url", "ready_timeout")
        write_state(
            path,
            {
                "format": FORMAT,
                "phase": "begun",
                "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "plugins": facts["process"]["plugins"],
                "pythonpath": facts["process"]["pythonpath"],
                "active": facts["unit"]["active"] == "active",
                "dropin_directory": dropin_path(settings["unit"]).parent.is_dir(),
                "salt": salt,
                "settings": {name: settings[name] for name in names},
                "baseline": snapshot(settings, salt),
            },
        )
        _set_aside(records)
    _make_directory(dropin_path(settings["unit"]).parent, 0o755)
    _make_directory(records, 0o750)
    if facts["unit"]["uid"] is not None:
        os.chown(records, facts["unit"]["uid"], facts["unit"]["gid"])
    _lay_out(Path(settings["root"]), files)
    return {"changed": True}


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
    old = sorted(records.glob("*.jsonl"))
    if not old:
        return
    previous = records / "previous"
    shutil.rmtree(previous, ignore_errors=True)  # absent the first time
    previous.mkdir(mode=0o750)
    for path in old:
        path.replace(previous / path.name)


def switched_on(settings: Json) -> Json:
    """Note that the service runs with the probe, once it does: it answers, and a process of it has begun to record."""
    path, unit, records = Path(settings["state"]), settings["unit"], Path(settings["records"])
    state = read_state(path)
    if state is None:
        raise Failed(f"{path} is gone: the baseline is lost, switch debugging off")
    seconds = float(settings.get("ready_timeout") or 600)
    _wait(settings.get("ready_url") or "", seconds)
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
    return {"changed": True}


# --- restoring


def restore(settings: Json) -> Json:
    """Take the probe away and prove that everything is as it was: {"differences": […]}, an empty list when it is.

    May be interrupted and run again at any point: the state file goes last.
    """
    path = Path(settings["state"])
    state = read_state(path)
    unit = settings["unit"]
    if not _traces(settings):
        return {"changed": False, "restarted": False, "baseline": None, "compared": {}, "differences": []}
    _settle(unit, float(settings.get("ready_timeout") or 600))
    if not settings.get("allow_restart", True) and _needs_restart(unit, state):
        raise Failed(f"{unit} runs with the probe, and debug_probes_allow_restart is false: nothing was changed")
    if state is not None:
        with contextlib.suppress(OSError):  # records that filled the disk must not keep the probe on
            write_state(path, {**state, "phase": "restoring"})
    dropin, root, records = dropin_path(unit), Path(settings["root"]), Path(settings["records"])
    _remove(dropin)
    if state is None or not state["dropin_directory"]:
        with contextlib.suppress(OSError):  # other drop-ins came to lie there, or it was never made
            dropin.parent.rmdir()
    run("systemctl", "daemon-reload")
    restarted = _needs_restart(unit, state)
    if restarted:
        run("systemctl", "reset-failed", unit)
        run("systemctl", "restart", unit)
        _wait(settings.get("ready_url") or "", float(settings.get("ready_timeout") or 600))
    shutil.rmtree(root, ignore_errors=True)
    if root.exists():
        raise Failed(f"{root} could not be removed")
    if settings.get("remove_records"):
        shutil.rmtree(records, ignore_errors=True)
    found = [] if state is None else differences(state["baseline"], snapshot(state["settings"], state["salt"]))
    if not found or settings.get("accept_differences"):
        for leftover in (path, path.with_suffix(".new"), path.with_name(SCRIPT)):
            _remove(leftover)
        with contextlib.suppress(OSError):  # the directory may hold what is not ours, or not exist
            path.parent.rmdir()
    return {
        "changed": True,
        "restarted": restarted,
        "baseline": None if state is None else state["since"],
        "compared": {} if state is None else {part: _size(items) for part, items in state["baseline"].items()},
        "differences": found,
    }


def _size(items: Any) -> int:
    """How many things a part of the baseline holds: files of the engine, otherwise lines or names."""
    return int(items["files"]) if "files" in items else len(items)


def _traces(settings: Json) -> bool:
    """Whether anything of the probe is left; another restore may have ended while this one waited for the lock."""
    left = (Path(settings["state"]), Path(settings["root"]), dropin_path(settings["unit"]))
    pid = int(show(settings["unit"], ["MainPID"]).get("MainPID", "0"))
    script = Path(settings["state"]).with_name(SCRIPT)
    return any(path.exists() for path in (*left, script)) or "PIVOT_PROBE_DIR" in process_environment(pid)


def _settle(unit: str, seconds: float) -> None:
    """Until a start or a stop that is under way, perhaps of an interrupted switch, has come to its end."""
    end = time.monotonic() + seconds
    while show(unit, ["ActiveState"]).get("ActiveState") in ("activating", "deactivating", "reloading"):
        if time.monotonic() > end:
            raise Failed(f"{unit} has been starting or stopping for {seconds:.0f} s: look at it first")
        time.sleep(0.5)


def _needs_restart(unit: str, state: Optional[Json]) -> bool:
    """Whether the probe still runs in the service, or the service died while it did."""
    facts = show(unit, ["ActiveState", "MainPID"])
    pid = int(facts.get("MainPID", "0"))
    if pid and "PIVOT_PROBE_DIR" in process_environment(pid):
        return True
    return facts.get("ActiveState") == "failed" and state is not None and bool(state["active"])


def _wait(url: str, seconds: float) -> None:
    """Until the service answers 200; without a URL `systemctl restart` has waited already."""
    if not url:
        return
    end = time.monotonic() + seconds
    while True:
        # refused: not up yet; an HTTP error: up and not ready (503)
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - the role checks it
            if answer.status == 200:
                return
        if time.monotonic() > end:
            raise Failed(f"{url} did not answer 200 within {seconds:.0f} s of the restart")
        time.sleep(1)


def _remove(path: Path) -> None:
    """Remove a file that may be gone already."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


@contextlib.contextmanager
def alone(verb: str) -> Iterator[None]:
    """Only one switch at a time on this host: one that lost its controller may still be at work. Looking needs none."""
    if verb == "look":
        yield
        return
    with LOCK.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Do what the argument asks; without one, restore what the state beside this file describes."""
    verbs = {"look": look, "begin": begin, "on": switched_on, "restore": restore}
    try:
        if len(sys.argv) > 1:
            settings = json.loads(sys.argv[1])
        else:
            state = read_state(Path(__file__).resolve().with_name("state.json"))
            if state is None:
                print(json.dumps({"changed": False}))
                return 0
            settings = {**state["settings"], "do": "restore"}
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
