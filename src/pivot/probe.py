"""The debug probe's toggle: what is on a host and what is wanted → what to change, or why not.

The facts come from ``roles/debug_probes/files/probe_state.py`` (``look``); nothing here touches a host.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from pivot.findings import Finding, Severity

PLUGIN = "pivot_probe"
# the first SGLang whose plugin framework the probe can use
FIRST_VERSION = (0, 5, 11)
ENVIRONMENT_FILE = "environment"
REFERENCE = "docs/faults.md"


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """What the role was asked for. unit: with its suffix; directories are absolute paths on the host.

    max_bytes: of all records; rows: recorded per forward; disable_cuda_graph: add the flag to the command line;
    ready_url: polled after the restart, may be empty.
    """

    unit: str
    python: str
    root: str
    records: str
    max_bytes: int
    rows: int
    disable_cuda_graph: bool
    allow_restart: bool
    ready_url: str

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Wanted:
        """The role's variables by name; a TypeError names one that is missing or unknown."""
        return cls(**values)


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What to do. refusal: one sentence, empty when nothing stands in the way; changes: what differs, empty when
    all is as wanted; environment and dropin: the two files' contents; says: what a person should hear first."""

    refusal: str = ""
    changes: tuple[str, ...] = ()
    restart: bool = False
    environment: str = ""
    dropin: str = ""
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


# --- on and off


def plan_on(facts: Mapping[str, Any], wanted: Wanted, package: Mapping[str, str]) -> Plan:
    """How to bring the probe into a service: nothing when it already runs with exactly this probe."""
    refusal = str(facts.get("failed", "")) or _unfit(facts, wanted) or _untidy(facts)
    if refusal:
        return Plan(refusal=refusal)
    environment = environment_text(facts, wanted)
    files = {**package, ENVIRONMENT_FILE: environment}
    dropin = dropin_text(facts, wanted)
    changes = _differences(facts, wanted, files, dropin)
    if not changes:
        return Plan(environment=environment, dropin=dropin)
    if not wanted.allow_restart:
        return Plan(refusal=_no_consent(wanted, "on"))
    return Plan(changes=tuple(changes), restart=True, environment=environment, dropin=dropin, says=tuple(_says(wanted)))


def plan_off(facts: Mapping[str, Any], wanted: Wanted) -> Plan:
    """How to take the probe away: nothing when no trace of it is left. Records are no trace."""
    if "failed" in facts:
        return Plan(refusal=str(facts["failed"]))
    installed, state = facts["installed"], facts["state"]
    running = facts["process"]["records"] is not None
    traces = {
        "the state file": state["phase"] != "off",
        "the restore script": installed["script"],
        "the drop-in": installed["dropin"] is not None,
        "the probe's directory": installed["root"],
        "the probe in the running service": running,
    }
    changes = tuple(name for name, there in traces.items() if there)
    # a unit on its way up or down may come up with the probe: an interrupted switch may have asked for it
    restart = running or (bool(changes) and facts["unit"]["active"] not in ("active", "inactive"))
    if restart and not wanted.allow_restart:
        return Plan(refusal=_no_consent(wanted, "off"))
    return Plan(changes=changes, restart=restart)


def _unfit(facts: Mapping[str, Any], wanted: Wanted) -> str:
    """Why this service cannot be observed at all; empty when it can."""
    unit, engine = facts["unit"], facts["engine"]
    if wanted.ready_url and not wanted.ready_url.startswith(("http://", "https://")):
        return f"debug_probes_ready_url: {wanted.ready_url} is neither http:// nor https://"
    if not unit["loaded"]:
        return f"debug_probes_unit: there is no unit {wanted.unit} on this host"
    if "error" in engine:
        return f"debug_probes_python: {wanted.python} imports no SGLang ({engine['error']})"
    if version_tuple(engine["version"]) < FIRST_VERSION:
        least = ".".join(map(str, FIRST_VERSION))
        return (
            f"SGLang {engine['version']} of {wanted.python} has no plugin framework, which came with {least}: "
            "the probe cannot be loaded; hidden states over HTTP (return_hidden_states) still work there"
        )
    if wanted.disable_cuda_graph and "error" in unit["exec_start"]:
        return (
            f"CUDA graphs cannot be switched off for {wanted.unit}: {unit['exec_start']['error']}; set "
            "debug_probes_disable_cuda_graph to false and give disable-cuda-graph by the service's own means"
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
    return ""


def _no_consent(wanted: Wanted, switch: str) -> str:
    return (
        f"switching debugging {switch} restarts {wanted.unit}, and debug_probes_allow_restart is false: "
        "nothing was changed"
    )


def _differences(facts: Mapping[str, Any], wanted: Wanted, files: Mapping[str, str], dropin: str) -> list[str]:
    """What on the host is not as wanted, in the order in which it will be changed."""
    installed, records, unit = facts["installed"], facts["records"], facts["unit"]
    there = installed["files"]
    changes = [] if facts["state"]["phase"] == "on" else ["the baseline"]
    if not records["exists"] or (unit["uid"] is not None and records["uid"] != unit["uid"]):
        changes.append("the records directory")
    changes.extend(sorted(name for name, text in files.items() if there.get(name) != _sha256(text)))
    changes.extend(f"{name} (stale)" for name in sorted(there) if name not in files)
    if installed["dropin"] != _sha256(dropin):
        changes.append("the drop-in")
    if facts["process"]["records"] != wanted.records:
        changes.append("the running service")
    return changes


def _says(wanted: Wanted) -> list[str]:
    """What should be known before the restart."""
    lines = [f"{wanted.unit} is restarted once, with the probe; debug-off restarts it once more, without."]
    if wanted.disable_cuda_graph:
        lines.append(
            "CUDA graphs are switched off while debugging (--disable-cuda-graph): Python sees nothing inside a "
            "replayed graph. Serving is slower until debug-off, and a fault that only graphs cause is hidden. "
            "This path has not been tried on a GPU by this project's own tests."
        )
    return lines


# --- the files


def environment_text(facts: Mapping[str, Any], wanted: Wanted) -> str:
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
        "PIVOT_PROBE_ROWS": str(wanted.rows),
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
    return f"equal to the baseline of {result['baseline']}: {parts}"


def _shown(value: object) -> str:
    return "absent" if value is None else repr(value)
