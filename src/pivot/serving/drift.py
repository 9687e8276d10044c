"""What runs against what was meant, character for character.

The process tells its command line and environment (`/proc/PID`), the unit recorded which files that start read, and the
server says with which settings it works (`/server_info`). Secrets: values of variables and flags whose names say secret
are never in a message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pivot.bundles.redact import MASK, Redactor
from pivot.bundles.secret_names import secret_name
from pivot.findings import Finding, Severity
from pivot.serving.launch import ARGV_ONLY, sha256

ERROR, WARNING = Severity.ERROR, Severity.WARNING
HIDDEN = "sha256:"  # how server_state.py says the value of a secret variable
# the probe's drop-in adds arguments and variables of its own while it is on; every report says that it is
PROBE = "pivot-probe"


def restart_reasons(wanted: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    """Why the RUNNING server is not the wanted one; empty when it is, or when none runs.

    wanted: files (path → sha256), argv, environment. state: what server_state.py reports of the main process:
    `running` null or {argv, environment, started: path → sha256 at its start}.
    """
    running = state.get("running")
    if not running:
        return []
    started = running.get("started") or {}
    return [
        *_arguments(wanted["argv"], running["argv"], extra_allowed=bool(state.get("drop_ins"))),
        *_variables(wanted["environment"], running["environment"]),
        *(
            f"it was started with another {path}"
            for path, digest in sorted(wanted["files"].items())
            if started.get(path) != digest
        ),
    ]


def restart_findings(subject: str, reasons: Sequence[str], *, allowed: bool) -> list[Finding]:
    """A restart that nobody consented to; none where there is no reason for one, or consent."""
    if allowed or not reasons:
        return []
    return [
        Finding(
            "SERVER-RESTART-NEEDED",
            Severity.ERROR,
            subject,
            "the running server differs from the wanted one and would have to be restarted: " + "; ".join(reasons),
            "set sglang_server_allow_restart: true (or -e sglang_server_allow_restart=true) when it may be interrupted",
        )
    ]


def check(
    subject: str, wanted: Mapping[str, Any], state: Mapping[str, Any], info: Mapping[str, Any] | None
) -> list[Finding]:
    """Every difference between the running server and the wanted one, each by its name.

    wanted: as for `restart_reasons`, and settings: flag → value of everything that launch.yaml holds, in its order;
    state: as there; info: what /server_info answers, None when the server was not asked.
    """
    if not state.get("running"):
        message = "no process of the server runs, so there is nothing to compare"
        return [Finding("SERVER-DOWN", ERROR, subject, message, "ansible-playbook playbooks/serve.yml starts it")]
    reasons = restart_reasons(wanted, state)
    again = "ansible-playbook playbooks/serve.yml brings the wanted one back, or write into the inventory what runs"
    found = [Finding("SERVER-DRIFT", ERROR, subject, reason, again) for reason in reasons]
    if others := [] if probe_is_on(state) else state["running"].get("others", []):
        message = f"{', '.join(others)} of its environment {'is' if len(others) == 1 else 'are'} in no inventory"
        fix = "write it into sglang_server_environment, or remove it: systemctl cat, systemctl show-environment"
        found.append(Finding("SERVER-EXTRA", ERROR, subject, message, fix))
    if info is not None:
        found += _answers(subject, wanted, info, arrived=not reasons, probed=probe_is_on(state))
    return found


def probe_is_on(state: Mapping[str, Any]) -> bool:
    """Whether the debug probe is on."""
    return any(PROBE in name for name in state.get("drop_ins") or [])


# --- the process


def _shown(name: str, value: object) -> str:
    """A value for a message; a secret one is masked, and a secret in one."""
    hidden = value is not None and (secret_name(name) or str(value).startswith(HIDDEN))
    return MASK if hidden else Redactor().text(repr(value))


def _variables(wanted: Mapping[str, str], running: Mapping[str, str]) -> Iterator[str]:
    for name, value in sorted(wanted.items()):
        if running.get(name) not in (value, HIDDEN + sha256(value)):
            yield f"{name} is {_shown(name, running.get(name))} in its environment, not {_shown(name, value)}"


def _arguments(wanted: Sequence[str], running: Sequence[str], *, extra_allowed: bool) -> Iterator[str]:
    """Differences of two command lines, by flag. extra_allowed: a drop-in may append arguments of its own."""
    if list(running) == list(wanted) or (extra_allowed and list(running[: len(wanted)]) == list(wanted)):
        return
    begin, meant = _split(wanted)
    really, given = _split(running)
    if begin != really:
        yield f"its command line begins with {' '.join(really)}, not {' '.join(begin)}"
    for name in sorted({*meant, *given}):
        if name not in given:
            yield f"--{name} is missing on its command line"
        elif name not in meant:
            if not extra_allowed:
                yield f"--{name} is on its command line and in no inventory"
        elif meant[name] != given[name]:
            values = f"{_shown(name, given[name])}, not {_shown(name, meant[name])}"
            yield f"--{name} is {values} on its command line"
    if begin == really and meant == given:
        yield "its command line has the wanted flags in another order or spelling"


def _split(argv: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """A command line: what stands before the first flag, and the words behind each flag or its equals sign."""
    first = next((index for index, word in enumerate(argv) if word.startswith("--")), len(argv))
    found: dict[str, list[str]] = {}
    name = ""
    for word in argv[first:]:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found.setdefault(name, []).extend([value] if equals else [])
        else:
            found[name].append(word)
    return list(argv[:first]), found


# --- what the server says of itself


def _answers(
    subject: str, wanted: Mapping[str, Any], info: Mapping[str, Any], *, arrived: bool, probed: bool
) -> Iterator[Finding]:
    """arrived: the process has the wanted command line and files, so what differs here was changed by the engine."""
    settings: Mapping[str, Any] = wanted["settings"]
    for name, value in settings.items():
        key = name.replace("-", "_")
        if key not in info or _same(value, info[key]):
            continue
        message = f"{name} is {_shown(name, info[key])} in the running server, not {_shown(name, value)}"
        if arrived:
            message += ", though it was started with the wanted value: the engine changed it"
            fix = "write the value that it uses, or look into the log of its start for the reason"
            yield Finding("SERVER-ADJUSTED", WARNING, subject, message, fix)
        else:
            fix = "ansible-playbook playbooks/serve.yml, or write into the inventory what runs"
            yield Finding("SERVER-DRIFT", ERROR, subject, message, fix)
    line = info.get("launch_command")
    if isinstance(line, str):
        yield from _extra_flags(subject, settings, line, wanted["argv"], probed=probed)
    if isinstance(line, str) and arrived and not probed:
        meant = merged_line(settings, wanted["argv"])
        if line != meant:
            message = f"SGLang read other arguments than were written: {_first_difference(settings, line, meant)}"
            fix = "a value that SGLang reads otherwise: write it in another form; then this is a fault of Pivot"
            yield Finding("SERVER-INEXACT", ERROR, subject, message, fix)


def _extra_flags(
    subject: str, settings: Mapping[str, Any], line: str, argv: Sequence[str], *, probed: bool
) -> Iterator[Finding]:
    """Flags of the running server that nobody wrote into an inventory, as of a launch.yaml that was edited."""
    known = {*settings, *(name.removeprefix("no-") for name in _split(argv)[1])}
    texts = " ".join(_texts(value) for value in settings.values())  # a value may look like a flag
    extra = sorted(
        {
            name
            for word in line.split(" ")
            for name in [word[2:].partition("=")[0]]  # what follows may be a secret
            if word.startswith("--") and name.removeprefix("no-") not in known and word not in texts
        }
    )
    if extra and not probed:
        message = f"{', '.join(f'--{name}' for name in extra)} of the running server is in no inventory"
        fix = "write it into sglang_server_launch, or ansible-playbook playbooks/serve.yml takes it away"
        yield Finding("SERVER-EXTRA", ERROR, subject, message, fix)


def merged_line(settings: Mapping[str, Any], argv: Sequence[str]) -> str:
    """The command line that SGLang makes of --config and its own arguments, joined as it reports it.

    settings: what launch.yaml holds, in its order; argv: of the process.
    """
    words: list[str] = []
    for name, value in settings.items():
        if isinstance(value, bool):
            words += [f"--{name}"] if value else []
        elif isinstance(value, list):
            words += [f"--{name}", *map(str, value)] if value else []
        else:
            words += [f"--{name}", _texts(value)]
    config = list(argv).index("--config")
    return " ".join([*words, *argv[config + 2 :]])


def _texts(value: object) -> str:
    return json.dumps(value, sort_keys=True) if isinstance(value, Mapping) else str(value)


def _first_difference(settings: Mapping[str, Any], line: str, meant: str) -> str:
    """Where two lines begin to differ, as the flag there; no value is shown, it may be a secret's."""
    at = next((index for index, pair in enumerate(zip(line, meant, strict=False)) if pair[0] != pair[1]), 0)
    begun = [word[2:] for word in meant[: at + 1].split(" ") if word.startswith("--")]
    named = [name for name in begun if name in settings or name in ARGV_ONLY]
    return f"from {'--' + named[-1] if named else 'the first flag'} on"


def _same(wanted: object, running: object) -> bool:
    """Whether the server works with what the inventory says: numbers by value, JSON by content, texts exactly."""
    if isinstance(wanted, bool) or isinstance(running, bool):
        return wanted is running
    if isinstance(wanted, Mapping):
        return running == wanted or (isinstance(running, str) and running == json.dumps(wanted, sort_keys=True))
    if isinstance(wanted, list):
        items = running if isinstance(running, list) else None
        return items is not None and len(items) == len(wanted) and all(map(_same, wanted, items))
    if isinstance(running, int | float):
        return running in _readings(str(wanted))
    if isinstance(running, Mapping | list):
        return isinstance(wanted, str) and _json(wanted) == running
    return str(wanted) == running


def _readings(text: str) -> set[float]:
    """The numbers that a text can mean; of 128k and 128Ki the sense of the unit has changed between versions."""
    found = re.fullmatch(r"([+-]?[0-9.]+(?:e[+-]?[0-9]+)?)([kKmMgGtT])?i?", text.strip())
    try:
        number = float(found[1]) if found else None
    except ValueError:
        number = None
    if found is None or number is None:
        return set()
    power = "kmgt".index(found[2].lower()) + 1 if found[2] else 0
    return {number * 1000**power, number * 1024**power}


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None
