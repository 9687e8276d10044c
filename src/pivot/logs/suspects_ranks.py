"""Suspects about processes and ranks: who is stopped, who waits, and what the ranks did not do together."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from pivot.findings import Severity
from pivot.logs.evidence import Facts, Process
from pivot.logs.gpu_logs import NcclLog
from pivot.logs.log_lines import Evidence
from pivot.logs.server_log import Run
from pivot.logs.suspect import Suspect, suspect

STACKS = "py-spy dump --pid PID of every scheduler, twice: the rank that differs is the one to look at"


def process_line(process: Process) -> Evidence:
    """A process as evidence."""
    waits = f", in {process.waits_in}" if process.waits_in not in ("", "0") else ""
    busy = f", {process.busy:.2f} s of CPU between two looks" if process.busy is not None else ""
    return Evidence("processes.json", 0, f"pid {process.pid} {process.name}: state {process.state}{busy}{waits}")


def processes(facts: Facts) -> Iterator[Suspect]:
    """Processes that are stopped or dead, and those that wait for the storage."""
    stopped = [process for process in facts.processes if process.state in ("T", "t")]
    if stopped:
        names = ", ".join(f"{process.name} ({process.pid})" for process in stopped)
        yield suspect(
            "DIAG-PROCESS-STOPPED",
            Severity.ERROR,
            facts,
            f"{names} is stopped: by SIGSTOP, or by a debugger that holds it",
            f"kill -CONT {stopped[0].pid}, when no debugger is at work",
            evidence=map(process_line, stopped),
        )
    dead = [process for process in facts.processes if process.state in ("Z", "X") and "sglang" in process.name]
    if dead:
        names = ", ".join(f"{process.name} ({process.pid})" for process in dead)
        yield suspect(
            "DIAG-PROCESS-DEAD",
            Severity.ERROR,
            facts,
            f"{names} has died, and the server did not notice",
            "systemctl restart sglang; the journal before its last line, and the node's kernel log, may say why",
            evidence=map(process_line, dead),
        )
    waiting, run = [process for process in facts.processes if process.state == "D"], facts.run
    if waiting and run and run.loading and not run.ready:
        yield suspect(
            "DIAG-STORAGE",
            Severity.WARNING,
            facts,
            "weights are being loaded, and the processes wait for the storage",
            "iostat -x 2; weight-loader-prefetch-checkpoints or weight-loader-disable-mmap may help",
            evidence=[run.loading, *map(process_line, waiting)],
        )


def diverged(facts: Facts) -> Iterator[Suspect]:
    """Ranks whose last collectives are not the same, by torch's flight recorder."""
    behind = facts.flight.behind()
    if behind:
        ranks = ", ".join(str(last.rank) for last in behind)
        yield suspect(
            "DIAG-RANKS-DIVERGE",
            Severity.ERROR,
            facts,
            f"rank {ranks} did not come to the collective that the others wait in",
            STACKS,
            evidence=[last.evidence for last in (*behind, *facts.flight.ahead())],
        )
    elif facts.flight.empty:
        yield suspect(
            "DIAG-FLIGHT-EMPTY",
            Severity.WARNING,
            facts,
            "the flight recorder was dumped, and had recorded nothing",
            "set TORCH_FR_BUFFER_SIZE=2000 in sglang_server_environment (older: TORCH_NCCL_TRACE_BUFFER_SIZE)",
            evidence=facts.flight.empty,
        )


def collectives(facts: Facts) -> Iterator[Suspect]:
    """A path between the GPUs that carries nothing: communicators are there, and no collective comes back."""
    run, note, peer, waits = facts.run, facts.note("collective"), facts.note("peer"), facts.note("watchdog")
    refused = peer is not None and re.search(r"C(?:UDA error: |uda failure .*)peer access", peer.first.text) is not None
    logs = [log for log in (facts.nccl, facts.log.nccl) if log.ranks]
    silent = [log for log in logs if silent_after_init(log)]
    stuck = run is not None and run.ready is None and not run.decode.lines
    if not (note or refused or (peer and waits) or (silent and stuck)):
        return
    ranks = [one for log in silent for one in log.complete]
    ways = {name.decode("utf-8", "replace") for log in logs for one in log.ranks.values() for name in one.transports}
    path = f" over {', '.join(sorted(ways))}" if ways else ""
    what = "a rank made no step, and the GPUs have no peer access"
    if note or refused:
        what = "a collective did not come back" if note else "a GPU is refused the memory of another"
    elif silent:
        what = f"all ranks are initialised, and no collective followed{path}"
    yield suspect(
        "DIAG-P2P",
        Severity.ERROR,
        facts,
        f"{what}: the path between the GPUs is suspect (ACS or the IOMMU redirects peer writes)",
        "lspci -vvv | grep -E 'ACSCtl.*(ReqRedir|CmpltRedir)\\+' on the node; to go on meanwhile, set "
        "NCCL_P2P_DISABLE=1 together with disable-custom-all-reduce",
        evidence=[note, peer, None if note or refused else waits, *(one.complete for one in ranks)],
    )


def silent_after_init(log: NcclLog) -> bool:
    """Whether communicators are there on every rank and nothing was ever sent (with COLL logged, or not at all)."""
    return bool(log.size) and len(log.complete) >= (log.size or 0) and log.collectives == 0


def half_disabled(facts: Facts) -> Iterator[Suspect]:
    """Peer access that NCCL may not use and SGLang's own all-reduce still does."""
    if facts.environment.get("NCCL_P2P_DISABLE") != "1" or facts.arguments.get("tp-size", "1") == "1":
        return
    if facts.arguments.get("disable-custom-all-reduce", "false").lower() != "true":
        yield suspect(
            "DIAG-P2P-HALF",
            Severity.WARNING,
            facts,
            "NCCL_P2P_DISABLE is 1, and SGLang's own all-reduce still writes to peers: a hang, or wrong data",
            "set disable-custom-all-reduce: true in sglang_server_launch, then deploy",
            evidence=[Evidence("process/environment.json", 0, "NCCL_P2P_DISABLE=1")],
        )


def watchdog(facts: Facts) -> Iterator[Suspect]:
    """A process that made no step for the whole watchdog time."""
    run = facts.run
    if run and (note := run.note("watchdog")):
        starting = run.ready is None and not run.decode.lines
        yield suspect(
            "DIAG-WATCHDOG",
            Severity.ERROR,
            facts,
            f"the {(note.groups or ('server',))[0].lower()} made no step for the whole watchdog time"
            f"{': kernels that are compiled for the first time take long, too' if starting else ''}",
            f"{STACKS}{'; or raise watchdog-timeout for a first start' if starting else ''}",
            evidence=[note],
        )


def mute(facts: Facts) -> Iterator[Suspect]:
    """A server that was ready and generates no more, and nothing else that says why."""
    run, answers = facts.run, [facts.answers.get(path) for path in ("/health", "/server_info")]
    if run is None or run.ready is None or run.broken or any(one.state in ("T", "t", "Z") for one in facts.processes):
        return
    failed = run.note("health-failed")
    unanswered = all(answer is not None and (answer.status is None or answer.status >= 500) for answer in answers)
    if (failed and nothing_after(run, failed.last)) or unanswered:
        yield suspect(
            "DIAG-MUTE",
            Severity.ERROR,
            facts,
            "it was ready, and nothing was generated since: a rank may wait in a collective, and the detokenizer that "
            "/health names is its victim",
            STACKS,
            evidence=[failed, facts.log.evidence(run.decode.last)],
        )


def nothing_after(run: Run, evidence: Evidence) -> bool:
    """Whether no token and no good answer followed a line."""
    generated = run.decode.last is not None and run.decode.last[0] > evidence.line
    return not generated and (run.health_good is None or run.health_good.last.line < evidence.line)


CHECKS: tuple[Callable[[Facts], Iterator[Suspect]], ...] = (diverged, collectives, half_disabled, watchdog, mute)
