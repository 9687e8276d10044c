"""A server's state with its evidence, and suspects in order: ``pivot diagnose BUNDLE``.

The state is worked out from what the log, the unit, the processes and the answers say together. An answer that
contradicts the rest, such as a green ``/health`` beside a watchdog's line, is overruled.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import enum
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pivot.findings import Severity, plain
from pivot.logs.evidence import Answer, BundleError, Facts, read
from pivot.logs.log_lines import Evidence
from pivot.logs.server_log import Run
from pivot.logs.starts import Phase
from pivot.logs.suspect import SHOWN_LINES, Suspect
from pivot.logs.suspects import suspects
from pivot.logs.suspects_ranks import nothing_after, process_line, silent_after_init
from pivot.logs.suspects_told import ASIDE
from pivot.report import duration

LOOP = 2  # failed starts in a row that are a loop
SLOW = 3  # times the usual duration after which a phase is suspect
PATIENCE = 600.0  # seconds without a new milestone before silence means something
BUSY = 60.0  # a decode line this recent says that the server works, whatever /health says
# do not make a served answer bad
MEANT = frozenset(row[1] for row in ASIDE).union(
    ["DIAG-LOG-GAP", "DIAG-GPU-ECC", "DIAG-HEALTH-SLOW", "DIAG-NCCL-SILENT", "DIAG-FLIGHT-EMPTY"],
    ["DIAG-DEVICE-LATE", "DIAG-PCIE-LINK", "DIAG-PCIE-WIDTH", "DIAG-BAR1"],
)
# do not either while they are warnings: of cards that others have, and of what is past
PAST = frozenset({"DIAG-GPU-LOST", "DIAG-DRIVER", "DIAG-HOST-MEMORY"})


class State(enum.StrEnum):
    """How a server is."""

    STARTING = "starting"
    SERVING = "serving"
    BAD = "serving badly"
    HUNG = "hung"
    CRASHED = "crashed"
    LOOPING = "restarting in a loop"
    STOPPED = "stopped"
    UNKNOWN = "unknown"


GOOD = frozenset({State.SERVING, State.STARTING, State.STOPPED})


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """A state, why it is the one, and the lines that say so."""

    state: State
    why: str
    evidence: tuple[Evidence, ...] = ()

    def __post_init__(self) -> None:
        """Make what was quoted from a log plain."""
        object.__setattr__(self, "why", plain(self.why))


@dataclasses.dataclass(frozen=True, slots=True)
class Diagnosis:
    """The whole answer. usual: seconds of each phase in earlier runs (median)."""

    facts: Facts
    verdict: Verdict
    phases: list[Phase]
    usual: dict[str, float]
    suspects: list[Suspect]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        facts, run = self.facts, self.facts.run
        return {
            "schema": 1,
            "host": facts.host,
            "unit": facts.unit,
            "time": _clock(facts.time),
            "state": str(self.verdict.state),
            "why": self.verdict.why,
            "evidence": [_line(line) for line in self.verdict.evidence],
            "phases": [dataclasses.asdict(phase) for phase in self.phases],
            "usual_seconds": self.usual,
            "served": served(run) if run else {},
            "suspects": [
                {**suspect.finding.as_dict(), "evidence": [_line(line) for line in suspect.evidence]}
                for suspect in self.suspects
            ],
            "lacks": facts.lacks,
        }


def served(run: Run) -> dict[str, Any]:
    """Figures of what a run has served."""
    decode = run.decode
    return {
        "decode_lines": decode.lines,
        "accept_length": None if decode.accept_length is None else round(decode.accept_length, 3),
        "accept_length_lowest": decode.lowest[0] if decode.lowest else None,
        "accept_length_highest": decode.highest[0] if decode.highest else None,
        "accept_histogram": {f"{step:.2f}": count for step, count in sorted(decode.steps.items())},
        "tokens_per_second": None if decode.speed is None else round(decode.speed, 1),
        "kv_tokens": run.pool_tokens,
        "start_seconds": run.start_seconds,
    }


def diagnose(facts: Facts) -> Diagnosis:
    """The state of the server that a bundle is about, and what may be behind it."""
    usual = usual_phases(facts.earlier)
    found = suspects(facts)
    verdict = _verdict(facts, usual, found)
    return Diagnosis(facts, verdict, facts.run.phases if facts.run else [], usual, found)


def usual_phases(runs: Sequence[Run]) -> dict[str, float]:
    """Median seconds of each phase over the runs that became ready; a phase that comes twice is added up."""
    seconds: dict[str, list[float]] = {}
    for run in runs:
        if run.ready is None:
            continue
        sums: dict[str, float] = {}
        for phase in run.phases:
            sums[phase.name] = round(sums.get(phase.name, 0.0) + phase.seconds, 1)
        for name, value in sums.items():
            seconds.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in seconds.items()}


# --- the state


def _verdict(facts: Facts, usual: dict[str, float], found: Sequence[Suspect]) -> Verdict:
    run = facts.run
    if run is None and not facts.properties:
        neither = "the bundle has neither a log of the server nor its unit's properties"
        return Verdict(State.UNKNOWN, neither if facts.manifest else "no line of it is one of a server's log")
    if facts.properties.get("LoadState") in ("not-found", "masked") and run is None:
        return Verdict(State.UNKNOWN, f"there is no unit {facts.unit} on this host")
    return (
        _looping(facts)
        or _crashed(facts)
        or _hung(facts, usual)
        or _stopped(facts)
        or _starting(facts, usual)
        or _serving(facts, found)
    )


def _alive(facts: Facts) -> bool:
    """Whether the server's process is there; a log alone is taken as one of a server that runs."""
    if active := facts.properties.get("ActiveState"):
        return active in ("active", "activating", "reloading", "deactivating") and facts.properties.get(
            "SubState"
        ) not in ("auto-restart", "auto-restart-queued")
    return True


def _why(run: Run) -> tuple[str, tuple[Evidence, ...]]:
    """Why a run ended, the most telling line first."""
    if found := run.cause:
        return found[0][:200], (found[1],)
    for kind, words in (
        ("dead", "a scheduler died"),
        ("start-timeout", "systemd gave up waiting for the start"),
        ("exited", "the main process ended"),
        ("failed", "the unit failed"),
        ("hit", "a process hit an exception"),
        ("quit", "a child process failed"),
        ("warmup-failed", "the first request failed"),
        ("port", "a port that it needs is taken"),
    ):
        if note := run.note(kind):
            return f"{words}{f' ({chr(32).join(note.groups)})' if note.groups else ''}", (note.first,)
    return "its log does not say why", ()


def _looping(facts: Facts) -> Verdict | None:
    """Several failed starts in a row, and the server not back."""
    run = facts.run
    runs = [*facts.earlier, *([run] if run else [])]
    failed: list[Run] = []
    for one in reversed(runs):
        if one.failed:
            failed.append(one)
        elif one is not run or one.ready is not None:
            break
    given_up = next((note for one in reversed(runs[-2:]) if (note := one.note("gave-up"))), None)
    counter = facts.properties.get("NRestarts", "")
    restarts = int(counter) if counter.isdecimal() and len(counter) < 9 else 0
    serving = run is not None and run.ready is not None and not run.failed and _alive(facts)
    # systemd's own starts; those of people, one after another, are no loop
    again = max(restarts, sum(one.note("restart") is not None for one in failed))
    if serving or not failed or (given_up is None and (again == 0 or max(again, len(failed)) < LOOP)):
        return None
    why, evidence = _why(failed[0])
    times = max(len(failed), restarts)
    end = "systemd has given up" if given_up else "systemd starts it again and again"
    lines = (*evidence, *((given_up.first,) if given_up else ()))
    return Verdict(State.LOOPING, f"{times} starts failed, {end}; the last: {why}", lines)


def _crashed(facts: Facts) -> Verdict | None:
    run = facts.run
    result = facts.properties.get("Result", "success")
    failed = facts.properties.get("ActiveState") == "failed" or (not _alive(facts) and result != "success")
    if run is not None and (run.failed or facts.gave_up(run)):
        why, evidence = _why(run)
        return Verdict(State.CRASHED, why, evidence)
    if failed:
        earlier = [one for one in facts.earlier if one.failed]
        why, evidence = _why(earlier[-1]) if earlier else (f"the unit's result is {result}", ())
        return Verdict(State.CRASHED, why, (Evidence("unit-properties.txt", 0, f"Result={result}"), *evidence))
    return None


def _hung(facts: Facts, usual: dict[str, float]) -> Verdict | None:
    run = facts.run
    if run is None or not _alive(facts):
        return None
    if watchdog := run.note("watchdog"):
        good = run.health_good.last if run.health_good else None
        lines = (watchdog.first, *((good,) if good and good.line >= watchdog.first.line else ()))
        return Verdict(State.HUNG, f"the watchdog fired{_after(run, watchdog.first)}", lines)
    if collective := run.note("collective"):
        return Verdict(State.HUNG, "a collective operation timed out", (collective.first,))
    stopped = [process for process in facts.processes if process.state in ("T", "t")]
    if stopped:
        return Verdict(
            State.HUNG,
            f"{', '.join(process.name for process in stopped)} is stopped (state {stopped[0].state})",
            tuple(process_line(process) for process in stopped[:SHOWN_LINES]),
        )
    return _mute(facts, run) if run.ready else _stuck(facts, run, usual)


def _after(run: Run, evidence: Evidence) -> str:
    last = run.decode.last
    return f", {evidence.line - last[0]} lines after the last decode batch" if last and last[0] < evidence.line else ""


def _mute(facts: Facts, run: Run) -> Verdict | None:
    """A server that was ready and does not answer, while its log does not move."""
    asked = [answer for answer in facts.answers.values() if answer.path in ("/health", "/server_info")]
    silent = [answer for answer in asked if answer.status is None or answer.status >= 500]
    failed = run.note("health-failed")
    if not asked and failed and nothing_after(run, failed.last):
        return Verdict(State.HUNG, "it was ready, /health failed, and nothing was generated since", (failed.last,))
    if not silent or len(silent) < len(asked):
        return None
    last = facts.log.time(run.decode.last)
    if last is not None and facts.time is not None and run.zone and facts.time - last < BUSY:
        return None
    lines = tuple(_answer_line(answer) for answer in silent)
    return Verdict(State.HUNG, "it was ready, and answers no more", (*lines, *((failed.last,) if failed else ())))


def _stuck(facts: Facts, run: Run, usual: dict[str, float]) -> Verdict | None:
    """A start that does not get further."""
    silence = _silence(facts, run)
    if silence is None:
        return None
    name, _ = phase_now(run)
    limit = max(PATIENCE, SLOW * (_usual_of(name, run, usual) or 0.0))
    for log in (facts.nccl, facts.log.nccl):
        if silence > limit and silent_after_init(log):
            lines = tuple(one.complete for one in log.complete if one.complete)[:SHOWN_LINES]
            words = f"{len(log.complete)} ranks are initialised, and for {duration(silence)} no collective followed"
            return Verdict(State.HUNG, words, lines)
        if silence > limit and log.missing:
            ranks = ", ".join(str(one.rank) for one in log.missing if one.rank is not None)
            lines = tuple(one.started for one in log.missing if one.started)[:SHOWN_LINES]
            return Verdict(State.HUNG, f"rank {ranks} did not get through NCCL's initialisation", lines)
    busy = any((process.busy or 0.0) > 0.05 for process in facts.processes)
    if silence > limit and facts.processes and not busy and not any(p.state == "D" for p in facts.processes):
        return Verdict(
            State.HUNG,
            f"{name} has said nothing for {duration(silence)}, and no process computes or reads",
            tuple(process_line(process) for process in facts.processes[:SHOWN_LINES]),
        )
    return None


def _silence(facts: Facts, run: Run) -> float | None:
    """Seconds between the last line of the log and the bundle; None where the log's times name no zone."""
    last = run.last_time
    if (at := facts.log.time(run.decode.last)) is not None:
        last = max(last or at, at)
    return facts.time - last if facts.time is not None and last is not None and run.zone else None


def _stopped(facts: Facts) -> Verdict | None:
    run = facts.run
    if facts.properties and not _alive(facts):
        lines = (run.ended,) if run and run.ended else ()
        return Verdict(State.STOPPED, "the unit is not active, and ended without a fault", lines)
    asked = run.note("asked") if run is not None and run.clean else None
    if not facts.properties and asked:
        return Verdict(State.STOPPED, "it was asked to end, and did", (asked.first,))
    return None


def phase_now(run: Run) -> tuple[str, Evidence | None]:
    """The phase that a start is in, and the line that began it; the names are those of `pivot.logs.starts.phases`."""
    if run.loading is not None:
        return f"weights of the {'drafter' if run.loads else 'target'}", run.loading
    if run.capturing is not None:
        return "CUDA graphs", run.capturing
    last = run.milestones[-1][2] if run.milestones else run.begin
    if not run.loads:
        return "imports", last
    return ("warm-up" if run.pool_tokens is not None else "memory pools"), last


def _starting(facts: Facts, usual: dict[str, float]) -> Verdict | None:
    run = facts.run
    if run is not None and (run.ready or run.decode.lines):
        return None
    if run is None and facts.properties.get("ActiveState") == "active":
        return Verdict(State.UNKNOWN, "the unit is active, and the bundle has nothing of its log")
    if run is None or (not facts.properties and not run.milestones and run.begin is None):
        return Verdict(State.UNKNOWN, "the log shows neither a start nor an answer")
    name, evidence = phase_now(run)
    expected = _usual_of(name, run, usual)
    since = run.first_time
    for time, _, line in run.milestones:
        since = time if line == evidence else since
    words = name
    if facts.time is not None and since is not None and run.zone:
        words += f" for {duration(max(0.0, facts.time - since))}"
    words += f"; {_expected(expected, usual)}"
    return Verdict(State.STARTING, words, (evidence,) if evidence else ())


def _usual_of(name: str, run: Run, usual: dict[str, float]) -> float | None:
    """How long the phase takes in earlier runs; weights are told apart by their order."""
    if name.startswith("weights of "):
        weights = [seconds for key, seconds in usual.items() if key.startswith("weights of ")]
        return weights[len(run.loads)] if len(run.loads) < len(weights) else None
    return usual.get(name)


def _expected(phase: float | None, usual: dict[str, float]) -> str:
    whole = f"a whole start takes {duration(sum(usual.values()))}" if usual else "no earlier start to compare with"
    return f"it usually takes {duration(phase)}, {whole}" if phase else whole


def _serving(facts: Facts, found: Sequence[Suspect]) -> Verdict:
    run = facts.run
    assert run is not None  # noqa: S101 - _starting has answered otherwise
    ready = (run.ready,) if run.ready else ()
    bad = [suspect for suspect in found if suspect.finding.code not in MEANT]
    worst = [suspect for suspect in bad if suspect.finding.severity is Severity.ERROR]
    worst = worst or [suspect for suspect in bad if suspect.finding.code not in PAST]
    if worst:
        return Verdict(State.BAD, worst[0].finding.message, worst[0].evidence)
    slow = [answer for answer in facts.answers.values() if answer.path == "/health" and answer.status != 200]
    if slow:
        return Verdict(State.BAD, "it generates, and /health does not answer in time", (_answer_line(slow[0]),))
    last = facts.log.evidence(run.decode.last)
    return Verdict(State.SERVING, _figures(run), (*ready, *((last,) if last else ())))


def _figures(run: Run) -> str:
    length, speed = run.decode.accept_length, run.decode.speed
    if not run.decode.lines:
        return "ready; the log shows no request yet"
    accept = f"accept length {length:.2f}" if length is not None else "no speculation"
    return f"{accept}{f', {speed:.0f} tok/s' if speed is not None else ''} over {run.decode.lines} decode lines"


def _answer_line(answer: Answer) -> Evidence:
    what = str(answer.status) if answer.status is not None else answer.error or "no answer"
    return Evidence("answers.json", 0, f"{answer.path}: {what} after {answer.seconds:.1f} s")


# --- in words


def _clock(time: float | None) -> str:
    return "" if time is None else datetime.datetime.fromtimestamp(time, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _line(line: Evidence) -> dict[str, Any]:
    return {"file": line.file, "line": line.line or None, "text": line.text}


def render(found: Diagnosis) -> str:
    """For a terminal."""
    facts, run, verdict = found.facts, found.facts.run, found.verdict
    head = "  ".join(part for part in (facts.host or facts.name, facts.unit, _clock(facts.time)) if part)
    lines = [head, f"state   {verdict.state.upper()}: {verdict.why}", *_quoted(verdict.evidence)]
    if found.phases:
        lines.append("start   " + ", ".join(f"{phase.name} {duration(phase.seconds)}" for phase in found.phases))
    if run and run.decode.lines:
        lines.append("served  " + _figures(run))
    for number, suspect in enumerate(found.suspects, start=1):
        finding = suspect.finding
        lines += [f"{number}. {finding.severity.upper()} {finding.code}  {finding.message}", *_quoted(suspect.evidence)]
        lines.append(f"        next: {finding.fix}")
    if not found.suspects:
        lines.append("nothing suspicious" if verdict.state in GOOD else "nothing here says why")
    lines += [f"lacks   {text}" for text in facts.lacks[:8]]
    if len(facts.lacks) > 8:
        lines.append(f"lacks   {len(facts.lacks) - 8} more, see manifest.json")
    return "\n".join(lines)


def _quoted(evidence: Sequence[Evidence]) -> list[str]:
    return [f"        {line}" for line in evidence]


def main(arguments: list[str]) -> int:
    """``pivot diagnose BUNDLE``: 0: it serves, starts or was stopped, without an error; 1: not; 2: no bundle."""
    parser = argparse.ArgumentParser("pivot diagnose", description="What a bundle, or a server's log, means.")
    parser.add_argument("bundle", type=Path, help="directory of a bundle, or a log file")
    parser.add_argument("--json", action="store_true", help="for programs")
    given = parser.parse_args(arguments)
    try:
        found = diagnose(read(given.bundle))
    except (BundleError, OSError) as error:
        print(f"pivot diagnose: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found.as_dict(), indent=1) if given.json else render(found))
    return (
        0
        if found.verdict.state in GOOD and not any(s.finding.severity is Severity.ERROR for s in found.suspects)
        else 1
    )
