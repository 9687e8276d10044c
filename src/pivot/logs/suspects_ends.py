"""Suspects about how a run ended: what it asked for in vain, its exception, and who killed it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from pivot.findings import Severity
from pivot.logs.evidence import Facts
from pivot.logs.log_lines import Note
from pivot.logs.server_log import Run
from pivot.logs.suspect import Suspect, suspect


def refused(facts: Facts) -> Iterator[Suspect]:
    """A port that was taken, and a start that nobody waited for."""
    run = facts.failure
    if run and (note := run.note("port")):
        yield suspect(
            "DIAG-PORT",
            Severity.ERROR,
            facts,
            "a port that the server needs is taken",
            "ss -ltnp shows by whom (system/sockets.txt in the bundle)",
            evidence=[note],
        )
    if run and (note := run.note("start-timeout")):
        yield suspect(
            "DIAG-START-TIMEOUT",
            Severity.ERROR,
            facts,
            "systemd gave up waiting for the start",
            "raise sglang_server_start_seconds above what the phases need",
            evidence=[note],
        )


def exception(facts: Facts) -> Iterator[Suspect]:
    """The first error that no other explains."""
    if facts.failure and (found := facts.failure.cause):
        yield suspect(
            "DIAG-EXCEPTION",
            Severity.ERROR,
            facts,
            f"the server ended with {found[0][:200]}",
            "pivot check: a layer id that does not exist, or the wrong number of them"
            if "aux hidden states" in found[0]
            else "read the traceback above this line",
            evidence=[found[1]],
        )


def faulted_gpus(facts: Facts) -> Iterator[Suspect]:
    """What a failed server's processes did on a GPU: an application's fault, which blocks nothing."""
    found = [xid for xid in facts.kernel.xids if xid.klass in ("application", "unknown", "recovered")]
    if found and facts.failure is not None:
        words = [f"Xid {xid.number} on {xid.device}{', reset since' * (xid.klass == 'recovered')}" for xid in found]
        named = ", ".join(dict.fromkeys(words))
        yield suspect(
            "DIAG-GPU-FAULT",
            Severity.WARNING,
            facts,
            f"a process has faulted on a GPU ({named}); the GPU itself goes on",
            "compare the time and the pid with the crash; NVIDIA's catalogue of Xids says what the number means",
            evidence=[xid.evidence for xid in found],
        )


def killed(facts: Facts) -> Iterator[Suspect]:
    """Processes that a signal ended, and those that the kernel caught."""
    if facts.failure and (death := _death(facts.failure)):
        yield suspect(
            "DIAG-KILLED",
            Severity.ERROR,
            facts,
            f"{death[0]} was killed by signal {death[1]}; {_sender(death[1])}",
            "dmesg -T | grep -i -E 'oom|killed process|segfault|traps' on the node; last, and the shell's history, "
            "name people",
            evidence=[death[2], facts.kernel.notes.get("segfault")],
        )


def _sender(signal: str) -> str:
    if signal in ("9", "15"):
        return "the OOM killer does that, and people do"
    return "a process gets that for what it did itself: a core file, if there is one, says where"


def _death(run: Run) -> tuple[str, str, Note] | None:
    """Which process a signal ended, by which signal, and where that stands."""
    dead, exited = run.note("dead"), run.note("exited")
    if dead and (code := next((group for group in dead.groups if re.fullmatch(r"-\d+", group)), "")):
        who = next((group for group in dead.groups if group != code), "a scheduler")
        return (f"rank {who}" if who.isdigit() and len(who) < 4 else who), code[1:], dead
    # the main process kills itself when a child is gone: that is no cause
    if exited and exited.groups[0] in ("killed", "dumped") and not run.notes.keys() & {"dead", "quit", "hit"}:
        return "the main process", exited.groups[1].partition("/")[0], exited
    return None


CHECKS: tuple[Callable[[Facts], Iterator[Suspect]], ...] = (refused, exception, faulted_gpus, killed)
