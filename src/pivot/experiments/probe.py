"""The debug probe's toggle: what is on a host and what is wanted → what to change, or why not.

The facts come from ``roles/debug_probes/files/probe_state.py`` (``look``); nothing here touches a host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import re
import runpy
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from pivot.engines import descriptions
from pivot.findings import Finding, Severity, errors, render
from pivot.report import duration

PLUGIN = "pivot_probe"
# the first SGLang whose plugin framework the probe can use
FIRST_VERSION = (0, 5, 11)
ENVIRONMENT_FILE = "environment"
REFERENCE = "docs/faults.md"
# how a session's records travel: what the session before left, and files of states, stay on the host
RSYNC = (
    *("--recursive", "--times", "--partial", "--delete", "--delete-excluded", "--compress", "--compress-level=1"),
    *("--chmod=D0700,F0600", "--exclude=/previous/", "--include=*.jsonl", "--exclude=*"),
)
# seconds: shorter, and nothing is recorded; longer, and it has been forgotten
SHORTEST, LONGEST = 20, 7 * 24 * 3600


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """What the role was asked for. unit: with its suffix; directories are absolute paths on the host.

    max_bytes, tensor_bytes: of all records and of all files of states; rows: recorded per forward; expiry: seconds
    until recording ends; expiry_restart: the restore may restart the service then; disable_cuda_graph: add the flag to
    the command line; ready_url: polled after the restart, may be empty.
    """

    unit: str
    python: str
    root: str
    records: str
    state: str
    max_bytes: int
    tensor_bytes: int
    rows: int
    expiry: int
    expiry_restart: bool
    disable_cuda_graph: bool
    allow_restart: bool
    ready_url: str

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Wanted:
        """The role's variables by name; a TypeError names one that is missing or unknown."""
        return cls(**values)


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What to do. refusal: why not, for a person, empty when nothing stands in the way; changes: what differs, empty
    when all is as wanted; environment, dropin, timer and service: the files' contents; until: when recording ends, UTC;
    says: what a person should hear first."""

    refusal: str = ""
    changes: tuple[str, ...] = ()
    restart: bool = False
    environment: str = ""
    dropin: str = ""
    timer: str = ""
    service: str = ""
    until: str = ""
    says: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain values."""
        return {**dataclasses.asdict(self), "changes": list(self.changes), "says": list(self.says)}


# --- the package


def payload(directory: Path) -> dict[str, str]:
    """The probe as it lies on a host: relative path → content, from its source directory.

    A wheel's layout made by hand: the package and a dist-info whose entry points SGLang finds on PYTHONPATH.
    A ValueError says when the directory holds no probe.
    """
    description = directory / "pyproject.toml"
    if not description.is_file():
        raise ValueError(f"debug_probes_package: {directory} holds no pyproject.toml of the probe")
    project = tomllib.loads(description.read_text(encoding="utf-8"))["project"]
    package = directory / "src" / PLUGIN
    files = {f"{PLUGIN}/{path.name}": path.read_text(encoding="utf-8") for path in sorted(package.glob("*.py"))}
    info = f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    files[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.4\nName: {project['name']}\nVersion: {project['version']}\n"
        f"Summary: {project['description']}\nLicense-Expression: {project['license']}\n"
    )
    groups = project["entry-points"]
    files[f"{info}/entry_points.txt"] = "\n".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in groups.items()
    )
    return files


def targets(directory: Path) -> list[str]:
    """What the probe needs of an engine: first what registers its hooks, then the functions that it hooks."""
    path = directory / "src" / PLUGIN / "targets.py"
    found = runpy.run_path(str(path))
    return [found["FRAMEWORK"], *found["HOOKED"]]


# --- on and off


def plan_on(facts: Mapping[str, Any], wanted: Wanted, package: Mapping[str, str], host: str = "") -> Plan:
    """How to bring the probe into a service: nothing when it already runs with exactly this probe."""
    if "failed" in facts:
        return Plan(refusal=str(facts["failed"]))
    found = [] if "error" in facts["engine"] else engine_findings(facts["engine"], host)
    refusal = _unfit(facts, wanted) or render(errors(found)) or _of_another(facts, wanted) or _untidy(facts)
    if refusal:
        return Plan(refusal=refusal)
    until = expiry(facts, wanted)
    environment = environment_text(facts, wanted, until)
    files = {**package, ENVIRONMENT_FILE: environment}
    made = Plan(
        environment=environment,
        dropin=dropin_text(facts, wanted),
        timer=timer_text(wanted, until),
        service=service_text(facts, wanted),
        until=until,
    )
    changes = _differences(facts, wanted, files, made)
    if not changes:
        return made
    if not wanted.allow_restart:
        return Plan(refusal=_no_consent(wanted, "on"))
    says = [*_says(facts, wanted, until), *render([*found, *space_findings(facts, wanted, host)]).splitlines()]
    return dataclasses.replace(made, changes=tuple(changes), restart=True, says=tuple(says))


def plan_off(facts: Mapping[str, Any], wanted: Wanted) -> Plan:
    """How to take the probe away: nothing when no trace of it is left. Records are no trace."""
    if "failed" in facts:
        return Plan(refusal=str(facts["failed"]))
    installed, state = facts["installed"], facts["state"]
    running = facts["process"]["records"] is not None
    own = (running, installed["dropin"] is not None, any(installed["expiry"].values()), installed["timer"])
    if other := _of_another(facts, wanted):
        if not any(own):
            return Plan()  # what lies there is not this service's
        if state["phase"] != "off" and state["unit"] != wanted.unit:
            return Plan(refusal=other)  # the restore would take, and forget, the other one's baseline
    traces = {
        "the state file": state["phase"] != "off",
        "the restore script": installed["script"],
        "the drop-in": installed["dropin"] is not None,
        "the probe's directory": installed["root"],
        "the expiry timer": any(installed["expiry"].values()) or installed["timer"],
        "the probe in the running service": running,
    }
    changes = tuple(name for name, there in traces.items() if there)
    # a unit on its way up or down may come up with the probe: an interrupted switch may have asked for it
    resting = ("active",) if state.get("active") else ("active", "inactive")
    restart = running or (bool(changes) and facts["unit"]["active"] not in resting)
    if restart and not wanted.allow_restart:
        return Plan(refusal=_no_consent(wanted, "off"))
    says = (_restart_text(wanted.unit, facts["unit"]["restarts"]),) if restart else ()
    return Plan(changes=changes, restart=restart, says=says)


def _unfit(facts: Mapping[str, Any], wanted: Wanted) -> str:
    """Why this service cannot be observed at all; empty when it can."""
    unit, engine = facts["unit"], facts["engine"]
    if wanted.ready_url and not wanted.ready_url.startswith(("http://", "https://")):
        return f"debug_probes_ready_url: {wanted.ready_url} is neither http:// nor https://"
    if not unit["loaded"]:
        return f"debug_probes_unit: there is no unit {wanted.unit} on this host"
    if "error" in engine:
        return f"debug_probes_python: {wanted.python} imports no SGLang ({engine['error']})"
    if not SHORTEST <= wanted.expiry <= LONGEST:
        return f"debug_probes_expiry: {wanted.expiry} is no number of seconds from {SHORTEST} to {LONGEST}"
    if wanted.disable_cuda_graph and "error" in unit["exec_start"]:
        return (
            f"CUDA graphs cannot be switched off for {wanted.unit}: {unit['exec_start']['error']}; set "
            "debug_probes_disable_cuda_graph to false and give disable-cuda-graph by the service's own means"
        )
    return ""


def _of_another(facts: Mapping[str, Any], wanted: Wanted) -> str:
    """Why another service's probe stands in the way; empty when none does."""
    state, apart = facts["state"], "debug_probes_state_file, debug_probes_root and debug_probes_records"
    if state["phase"] != "off" and state["unit"] != wanted.unit:
        return (
            f"debug_probes_state_file: {wanted.state} holds the baseline of {state['unit']}, which has the probe: "
            f"switch it off there first (debug-off with debug_probes_unit: {state['unit']}), "
            f"or give {wanted.unit} {apart} of its own"
        )
    if facts["neighbours"]:
        return (
            f"{', '.join(facts['neighbours'])} has the probe in {wanted.root} or records into {wanted.records}: "
            f"give {wanted.unit} {apart} of its own, or switch it off there first"
        )
    return ""


def _untidy(facts: Mapping[str, Any]) -> str:
    """Why switching on has to wait; empty when it need not."""
    phase = facts["state"]["phase"]
    if phase == "restoring":
        return "switching debugging off was interrupted on this host: finish it first (debug-off)"
    if phase != "off":
        return ""
    if facts["process"]["records"] is not None or facts["installed"]["dropin"] is not None:
        return "the probe is there but its baseline is gone: clean up first (debug-off)"
    if facts["unit"]["active"] != "active" or not facts["unit"]["pid"]:
        return f"the service is {facts['unit']['active']}, so there is no running state to come back to: start it first"
    if facts["unit"]["stale"]:
        return (
            "the unit's files changed since systemd read them, so the restart would bring in more than the probe: "
            "systemctl daemon-reload and restart the service first, or undo that change"
        )
    return ""


def _no_consent(wanted: Wanted, switch: str) -> str:
    return (
        f"switching debugging {switch} restarts {wanted.unit}, and debug_probes_allow_restart is false: "
        "nothing was changed; set it to true (or -e debug_probes_allow_restart=true) when it may be interrupted"
    )


def _differences(facts: Mapping[str, Any], wanted: Wanted, files: Mapping[str, str], plan: Plan) -> list[str]:
    """What on the host is not as wanted, in the order in which it will be changed."""
    installed, records, unit, state = facts["installed"], facts["records"], facts["unit"], facts["state"]
    there = installed["files"]
    changes = {"off": ["the baseline"], "on": []}.get(state["phase"], ["the interrupted switch"])
    if state["phase"] != "off" and _renewed(facts, wanted):
        changes.append("the expiry")
    kinds = {"timer": plan.timer, "service": plan.service}
    due = not state.get("expired")  # a timer that has elapsed stays inactive
    if any(installed["expiry"][kind] != _sha256(text) for kind, text in kinds.items()) or installed["timer"] != due:
        changes.append("the expiry timer")
    if not records["exists"] or (unit["uid"] is not None and records["uid"] != unit["uid"]):
        changes.append("the records directory")
    changes.extend(sorted(name for name, text in files.items() if there.get(name) != _sha256(text)))
    changes.extend(f"{name} (stale)" for name in sorted(there) if name not in files)
    if installed["dropin"] != _sha256(plan.dropin):
        changes.append("the drop-in")
    if (facts["process"]["records"], facts["process"]["until"]) != (wanted.records, plan.until):
        changes.append("the running service")
    return changes


def _says(facts: Mapping[str, Any], wanted: Wanted, until: str) -> list[str]:
    """What should be known before the restart."""
    then = "the service is restored and restarted" if wanted.expiry_restart else "the probe stays in until debug-off"
    lines = [
        f"{wanted.unit} is restarted once, with the probe; debug-off restarts it once more, without.",
        _restart_text(wanted.unit, facts["unit"]["restarts"]),
        f"Recording ends by itself at {until}; then {then}.",
    ]
    if wanted.disable_cuda_graph:
        lines.append(
            "CUDA graphs are switched off while debugging (--disable-cuda-graph): Python sees nothing inside a "
            "replayed graph. Serving is slower until debug-off, and a fault that only graphs cause is hidden. "
            "This path has not been tried on a GPU by this project's own tests."
        )
    return lines


def _restart_text(unit: str, seconds: Sequence[float]) -> str:
    """How long a restart is going to take, as far as the journal's earlier ones tell."""
    if not seconds:
        return f"How long {unit} takes to restart is not known yet: its journal holds none that could be timed."
    middle, count = statistics.median(seconds), len(seconds)
    spread = f"{duration(min(seconds))} to {duration(max(seconds))}, {count} restarts" if count > 1 else "one restart"
    return f"A restart of {unit} takes about {duration(middle)} (by its journal: {spread})."


# --- what this engine has


def engine_findings(engine: Mapping[str, Any], host: str) -> list[Finding]:
    """Whether the probe's hooks have a place in this engine, by the description of its version and by its own source.

    engine: version, and hooks: target → whether it is defined there (null: not to be told), the framework first.
    """
    version, hooks = engine["version"], engine.get("hooks", {})
    description = descriptions.load(version) or {}
    if version_tuple(version) < FIRST_VERSION:
        least = ".".join(map(str, FIRST_VERSION))
        flag = "enable-return-hidden-states"
        http = f", hidden states over HTTP (--{flag}) do" if flag in description.get("flags", {}) else ""
        message = f"SGLang {version} has no plugin framework, which came with {least}, so no probe can be loaded"
        fix = f"ansible-playbook playbooks/inspect.yml works there{http}; or pin {least} or later"
        return [Finding("PROBE-OLD-ENGINE", Severity.ERROR, host, message, fix, REFERENCE)]
    described = description.get("hooks", {})
    missing = [name for name, there in hooks.items() if False in (there, described.get(name))]
    if not missing:
        return []
    severity = Severity.ERROR if next(iter(hooks)) in missing else Severity.WARNING
    message = f"SGLang {version} lacks {', '.join(missing)}: what passes there is not recorded"
    fix = "serve a version that has them, or read the answer knowing it: it names what was not seen"
    return [Finding("PROBE-HOOK", severity, host, message, fix, REFERENCE)]


def space_findings(facts: Mapping[str, Any], wanted: Wanted, host: str) -> list[Finding]:
    """Whether the volume of the records has room for all they may take."""
    free, asked = int(facts["records"]["free"]), wanted.max_bytes + wanted.tensor_bytes
    if free >= asked:
        return []
    message = (
        f"{wanted.records} has {free >> 20} MiB free, and the records may take {asked >> 20} MiB: recording would end "
        "there; serving would not, but what else writes to that volume would fail"
    )
    fix = "lower debug_probes_max_bytes or debug_probes_tensor_bytes, or set debug_probes_records to another volume"
    return [Finding("PROBE-SPACE", Severity.WARNING, host, message, fix, REFERENCE)]


# --- the end by itself


def expiry(facts: Mapping[str, Any], wanted: Wanted) -> str:
    """When recording ends: as it was set for a probe that is on, else from now on; UTC, by the host's clock.

    The longest of the earlier restarts is added, since nothing is recorded meanwhile.
    """
    if facts["state"]["phase"] != "off" and not _renewed(facts, wanted):
        return str(facts["state"]["until"])
    now = datetime.datetime.fromisoformat(facts["now"])
    length = wanted.expiry + max(facts["unit"]["restarts"], default=0)
    return (now + datetime.timedelta(seconds=length)).strftime("%Y-%m-%dT%H:%M:%SZ")


def _renewed(facts: Mapping[str, Any], wanted: Wanted) -> bool:
    """Whether a probe that is on gets a new end: its own has passed, or another length is asked for."""
    state = facts["state"]
    asked = (wanted.expiry, wanted.expiry_restart)
    return facts["now"] >= state["until"] or (state["expiry"], state["expiry_restart"]) != asked


def timer_text(wanted: Wanted, until: str) -> str:
    """The timer that ends the probe; persistent, so that it also fires after a time in which the host was down."""
    return (
        "# Written by the role debug_probes; removed by it, or by the script beside its state file.\n"
        f"[Unit]\nDescription=The end of the debug probe of {wanted.unit}\n"
        f"[Timer]\nOnCalendar={until.replace('T', ' ').removesuffix('Z')} UTC\nAccuracySec=1s\nPersistent=true\n"
        "[Install]\nWantedBy=timers.target\n"
    )


def service_text(facts: Mapping[str, Any], wanted: Wanted) -> str:
    """What the timer starts: the restore that the role uses too, with the interpreter that ran it first.

    It tries again until it is through; 4 says that it is, and that something differs from the baseline.
    """
    script = PurePosixPath(wanted.state).parent / "restore.py"
    words = " ".join(_unit_word(word) for word in (facts["interpreter"], "-I", str(script), "expire"))
    return (
        "# Written by the role debug_probes; removed by it, or by the script beside its state file.\n"
        f"[Unit]\nDescription=Restores {wanted.unit} at the end of its debug probe\n"
        f"[Service]\nType=oneshot\nExecStart={words}\n"
        f"Restart=on-failure\nRestartSec=5min\nRestartPreventExitStatus=4\n"
    )


def _unit_word(word: str) -> str:
    """A word of a unit's command line, safe from systemd's own quoting and variables."""
    if re.fullmatch(r"[\w./+:@-]+", word):
        return word
    return '"' + re.sub(r'(["\\])', r"\\\1", word).replace("%", "%%").replace("$", "$$") + '"'


def banner(unit: str, state: Mapping[str, Any], now: str) -> str:
    """What everybody is told while the probe is on; empty when it is off. state: phase and until; now: UTC."""
    if state.get("phase", "off") == "off":
        return ""
    if state["phase"] != "on":
        return f"DEBUG PROBE HALF-WAY at {unit}: a switch was interrupted; --tags debug-off ends it"
    if now >= state["until"]:
        return (
            f"DEBUG PROBE IN {unit}: recording ended at {state['until']}; --tags debug-off takes it away (one restart)"
        )
    return f"DEBUG PROBE IN {unit} until {state['until']}: its figures mean nothing; --tags debug-off takes it away"


# --- the files


def environment_text(facts: Mapping[str, Any], wanted: Wanted, until: str) -> str:
    """The variables of the service while debugging, as systemd reads them.

    An EnvironmentFile, because one of the unit's own would win over `Environment=` lines. Plugins and paths that
    the service already names stay; without SGLANG_PLUGINS the engine loads every plugin it finds, so it stays unset.
    """
    source = facts["process"] if facts["state"]["phase"] == "off" else facts["state"]
    paths = [wanted.root, *filter(None, (source["pythonpath"] or "").split(":"))]
    variables = {
        "PYTHONPATH": ":".join(paths),
        "PIVOT_PROBE_DIR": wanted.records,
        "PIVOT_PROBE_MAX_BYTES": str(wanted.max_bytes),
        "PIVOT_PROBE_TENSOR_BYTES": str(wanted.tensor_bytes),
        "PIVOT_PROBE_ROWS": str(wanted.rows),
        "PIVOT_PROBE_UNTIL": until,
    }
    if source["plugins"]:
        names = [name.strip() for name in source["plugins"].split(",") if name.strip()]
        variables["SGLANG_PLUGINS"] = ",".join([*(name for name in names if name != PLUGIN), PLUGIN])
    return "".join(f'{name}="{_escaped(value)}"\n' for name, value in variables.items())


def _escaped(value: str) -> str:
    """A value between double quotes of an EnvironmentFile."""
    return value.replace("\\", "\\\\").replace('"', '\\"')


def dropin_text(facts: Mapping[str, Any], wanted: Wanted) -> str:
    """The drop-in. The leading dash keeps the unit startable if the probe's directory is lost."""
    lines = [
        "# Written by the role debug_probes; removed by it, or by the script beside its state file.",
        "[Service]",
        f"EnvironmentFile=-{PurePosixPath(wanted.root) / ENVIRONMENT_FILE}",
        f"ReadWritePaths=-{wanted.records}",
    ]
    if wanted.disable_cuda_graph:
        command = facts["unit"]["exec_start"].get("text", "")
        flag = "" if "--disable-cuda-graph" in command.split() else " --disable-cuda-graph"
        lines += ["ExecStart=", f"ExecStart={command}{flag}"]
    return "\n".join(lines) + "\n"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def version_tuple(text: str) -> tuple[int, ...]:
    """``0.5.10.post1`` → (0, 5, 10): the leading numbers of a version."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


# --- the proof


def failure_text(result: Mapping[str, Any]) -> str:
    """One sentence about an Ansible task that failed: what a script of this role said, else Ansible's own message."""
    with contextlib.suppress(ValueError, TypeError):
        said = json.loads(result.get("stdout") or "")
        if isinstance(said, dict) and said.get("failed"):
            return str(said["failed"])
    return str(result.get("msg") or "no message").strip()


def switched_findings(result: Mapping[str, Any], host: str) -> list[Finding]:
    """What changed besides the probe when the service was restarted with it."""
    return [
        Finding(
            "PROBE-OTHER-CHANGE",
            Severity.WARNING,
            host,
            f"the restart brought in more than the probe: {item['part']}, {item['item']}: "
            f"was {_shown(item['before'])}, is {_shown(item['after'])}",
            "somebody changed it since the service was started; debug-off will show it as a difference: undo it before",
            REFERENCE,
        )
        for item in result.get("others", [])
    ]


def restore_findings(result: Mapping[str, Any], host: str) -> list[Finding]:
    """What differs from the baseline after the probe was taken away; the values are as hidden as in the state."""
    if result.get("changed") and result.get("baseline") is None:
        message = "no baseline was recorded, so that equality with the state before cannot be proven"
        return [Finding("PROBE-NO-BASELINE", Severity.WARNING, host, message, "look at the unit yourself", REFERENCE)]
    return [
        Finding(
            "PROBE-RESTORE",
            Severity.ERROR,
            host,
            f"{item['part']}, {item['item']}: was {_shown(item['before'])}, is {_shown(item['after'])} "
            f"(baseline of {result['baseline']})",
            "undo that change, or run debug-off with debug_probes_accept_differences when it was wanted",
            REFERENCE,
        )
        for item in result.get("differences", [])
    ]


def restore_text(result: Mapping[str, Any]) -> str:
    """What was compared, for a restore without findings."""
    if not result.get("baseline"):
        return "nothing of the probe was left"
    parts = ", ".join(f"{part} ({count})" for part, count in result["compared"].items())
    text = f"equal to the baseline of {result['baseline']}: {parts}"
    return text + starts_text(result)


def starts_text(result: Mapping[str, Any]) -> str:
    """How often the service was started since the baseline, as an addition to a sentence; empty when nobody knows."""
    count = int(result.get("starts", -1))
    return f"; started {count} time{'' if count == 1 else 's'} since then, by the journal" if count >= 0 else ""


def _shown(value: object) -> str:
    return "absent" if value is None else repr(value)
