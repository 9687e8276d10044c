"""What may be behind a server's state: suspects in order, each with the lines that support it and the next command.

Causes that explain others stand first: a full volume before the exception it made, a stopped process before silence.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator

from pivot.evidence import Facts
from pivot.findings import Finding, Severity
from pivot.log_kinds import SHM
from pivot.log_lines import Evidence, Note
from pivot.server_log import Run

NEAR_ONE = 1.15  # an accept length up to this is a drafter that gives nothing
DECLINE = 0.75  # share of the accept length that is left in long contexts, below which it is worth a word
ENOUGH_LINES = 3
SHOWN_LINES = 4
OLD_SHM_SECONDS = 60


@dataclasses.dataclass(frozen=True, slots=True)
class Suspect:
    """A finding whose fix is the next command, and the lines that support it."""

    finding: Finding
    evidence: tuple[Evidence, ...]


def _made(finding: Finding, *evidence: Evidence | None) -> Suspect:
    return Suspect(finding, tuple(line for line in evidence if line is not None)[:SHOWN_LINES])


def _lines(note: Note) -> tuple[Evidence, ...]:
    return (note.first,) if note.count == 1 else (note.first, note.last)


def suspects(facts: Facts) -> list[Suspect]:
    """All suspects, the likeliest cause first."""
    return [suspect for check in CHECKS for suspect in check(facts)]


def _volume(facts: Facts) -> Iterator[Suspect]:
    note = facts.note("volume-full") or next(
        (found for run in _failed(facts) if (found := run.note("volume-full"))), None
    )
    full = [line for mount, kind, used, line in facts.volumes if used >= 100 and _written(mount, kind)]
    if note is None and not full:
        return
    code, subject, fix = (
        "DIAG-VOLUME-FULL",
        facts.host,
        "df -h; then free the volume that the line names, and start again",
    )
    if note is not None:
        message = "a volume that the server writes to is full"
        yield _made(Finding(code, Severity.ERROR, subject, message, fix), *_lines(note), *full)
    else:
        message = "a volume is full that logs or caches are written to"
        yield _made(Finding(code, Severity.WARNING, subject, message, fix), *full)


def _written(mount: str, kind: str) -> bool:
    """Whether a full volume there is a fault: weights may fill theirs, read-only images always do."""
    if kind in ("squashfs", "iso9660", "erofs") or mount.startswith((SHM, "/sys", "/proc", "/dev", "/models", "/snap")):
        return False
    return mount in ("/", "/run", "/home", "/root") or mount.startswith(("/var", "/tmp", "/run/", "/opt", "/etc"))  # noqa: S108 - compared


def _shared_memory(facts: Facts) -> Iterator[Suspect]:
    note = facts.note("shm-full")
    mounted = [(used, line) for mount, _, used, line in facts.volumes if mount == SHM]
    full = [line for used, line in mounted if used >= 99]
    if note or full:
        started = facts.run.first_time if facts.run else None
        old = [
            line
            for name, time, _, line in facts.listing
            if re.match(rf"{SHM}/(?:nccl|psm|sem)\b", name) and started is not None and time < started - OLD_SHM_SECONDS
        ]
        stale = f"; {len(old)} segments there are older than this start" if old else ""
        yield _made(
            Finding(
                "DIAG-SHM-FULL",
                Severity.ERROR,
                facts.host,
                f"shared memory is full: NCCL and SGLang need segments in {SHM}{stale}",
                f"df -h {SHM}; ls -l {SHM}; remove what no process uses, then give it more room (size, not NCCL flags)",
            ),
            *(_lines(note) if note else ()),
            *(full or [line for _, line in mounted]),
            *old,
        )
    if note := facts.note("shm-name"):
        yield _made(
            Finding(
                "DIAG-SHM-NAME",
                Severity.ERROR,
                facts.host,
                "a rank attaches to a segment without a name: the ranks chose different kinds of host memory",
                "set NCCL_CUMEM_HOST_ENABLE=0 for all ranks in sglang_server_environment, then deploy",
            ),
            *_lines(note),
        )
    if note := facts.note("shm-denied"):
        yield _made(
            Finding(
                "DIAG-SHM-DENIED",
                Severity.ERROR,
                facts.host,
                f"{SHM} refuses the server",
                f"stat {SHM} (mode 1777 is right)",
            ),
            *_lines(note),
        )


def _gpus(facts: Facts) -> Iterator[Suspect]:
    fatal = [xid for xid in facts.kernel.xids if xid.klass == "fatal"]
    devices = ", ".join(dict.fromkeys(xid.device for xid in fatal))
    lost = facts.kernel.notes.get("fell-off")
    if fatal or lost:
        yield _made(
            Finding(
                "DIAG-GPU-LOST",
                Severity.ERROR,
                facts.host,
                f"a GPU needs a reset ({devices or 'it fell off the bus'}); a warm reboot may not be enough",
                "power the node fully off and on, then nvidia-smi -q | grep -i recovery",
            ),
            *(xid.evidence for xid in fatal),
            *(_lines(lost) if lost else ()),
        )
    memory = [xid for xid in facts.kernel.xids if xid.klass == "memory"]
    if memory:
        yield _made(
            Finding(
                "DIAG-GPU-ECC",
                Severity.WARNING,
                facts.host,
                f"the memory of a GPU reports errors ({', '.join(dict.fromkeys(xid.device for xid in memory))})",
                "nvidia-smi -q -d ECC,ROW_REMAPPER",
            ),
            *(xid.evidence for xid in memory),
        )
    note, module, library = facts.note("driver") or facts.kernel.notes.get("driver"), *facts.driver
    if note or (module and library and module != library):
        pair = f": the module is {module}, libcuda is {library}" if module and library else ""
        yield _made(
            Finding(
                "DIAG-DRIVER",
                Severity.ERROR,
                facts.host,
                f"the node's driver and the container's libraries differ{pair}",
                "cat /proc/driver/nvidia/version; ldconfig -p | grep libcuda; install the pinned one where it moved",
            ),
            *(_lines(note) if note else ()),
        )


def _leftovers(facts: Facts) -> Iterator[Suspect]:
    own = {process.pid for process in facts.processes}
    foreign = [(pid, name, line) for pid, name, line in facts.on_gpus if own and pid not in own]
    notes = [note for kind in ("unbalanced", "left-behind") if (note := facts.note(kind))]
    if not foreign and not notes:
        return
    named = f": {', '.join(f'{name} ({pid})' for pid, name, _ in foreign[:4])}" if foreign else ""
    yield _made(
        Finding(
            "DIAG-LEFTOVERS",
            Severity.ERROR,
            facts.host,
            f"processes of an earlier run, or of somebody else, hold memory of the GPUs{named}",
            "nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv; end them by their pid",
        ),
        *(line for note in notes for line in _lines(note)),
        *(line for _, _, line in foreign),
    )


def _memory(facts: Facts) -> Iterator[Suspect]:
    if note := facts.note("gpu-memory"):
        yield _made(
            Finding(
                "DIAG-GPU-MEMORY",
                Severity.ERROR,
                facts.host,
                "a GPU has run out of memory",
                "lower mem-fraction-static, cuda-graph-max-bs or context-length (pivot check shows the budget)",
            ),
            *_lines(note),
        )
    kernel, note = facts.kernel.notes.get("host-memory"), facts.note("host-memory")
    kills = facts.memory_events.get("oom_kill", 0)
    if kernel or note or kills:
        counted = f"; its cgroup counts {kills} kills" if kills else ""
        yield _made(
            Finding(
                "DIAG-HOST-MEMORY",
                Severity.ERROR,
                facts.host,
                f"the host ran out of memory for the server{counted}",
                "raise the container's memory, or load with less prefetch: cat /sys/fs/cgroup/memory.events",
            ),
            *(_lines(note) if note else ()),
            *(_lines(kernel) if kernel else ()),
        )
    if note := facts.note("kv-memory"):
        yield _made(
            Finding(
                "DIAG-KV-MEMORY",
                Severity.WARNING,
                facts.host,
                f"requests do not fit the KV cache ({note.count} lines say so)",
                "lower max-running-requests or context-length, or raise mem-fraction-static",
            ),
            *_lines(note),
        )


def _processes(facts: Facts) -> Iterator[Suspect]:
    stopped = [process for process in facts.processes if process.state in ("T", "t")]
    if stopped:
        names = ", ".join(f"{process.name} ({process.pid})" for process in stopped)
        yield _made(
            Finding(
                "DIAG-PROCESS-STOPPED",
                Severity.ERROR,
                facts.host,
                f"{names} is stopped: by SIGSTOP, or by a debugger that holds it",
                f"kill -CONT {stopped[0].pid}, when no debugger is at work",
            ),
            *(Evidence("processes.json", 0, f"pid {one.pid} {one.name}: state {one.state}") for one in stopped),
        )
    waiting = [process for process in facts.processes if process.state == "D"]
    run = facts.run
    if waiting and run and run.loading and not run.ready:
        yield _made(
            Finding(
                "DIAG-STORAGE",
                Severity.WARNING,
                facts.host,
                "weights are being loaded, and the processes wait for the storage",
                "iostat -x 2; weight-loader-prefetch-checkpoints or weight-loader-disable-mmap may help",
            ),
            run.loading,
            *(
                Evidence("processes.json", 0, f"pid {one.pid} {one.name}: state D, in {one.waits_in}")
                for one in waiting
            ),
        )


def _caches(facts: Facts) -> Iterator[Suspect]:
    if note := facts.note("jit"):
        yield _made(
            Finding(
                "DIAG-JIT-CACHE",
                Severity.ERROR,
                facts.host,
                "a compiled kernel does not fit this engine: a cache of another version, or a build that failed",
                "move the caches of flashinfer, triton and tvm-ffi away (/var/cache/sglang), then start again",
            ),
            *_lines(note),
        )
    if note := facts.note("no-kernel"):
        yield _made(
            Finding(
                "DIAG-ARCHITECTURE",
                Severity.ERROR,
                facts.host,
                "a kernel is not built for this GPU",
                "pivot check names the attention backends that the card can run",
            ),
            *_lines(note),
        )


def _collectives(facts: Facts) -> Iterator[Suspect]:
    run, note, peer = facts.run, facts.note("collective"), facts.note("peer")
    broken = note is not None or (peer is not None and _is_broken(run))
    logs = [log for log in (facts.nccl, facts.log.nccl) if log.ranks]
    silent = [log for log in logs if silent_after_init(log.size, len(log.complete), _collective_count(log))]
    stuck = run is not None and run.ready is None and not run.decode.lines
    if not broken and not (silent and stuck):
        return
    ranks = [one for log in silent for one in log.complete]
    ways = {name.decode("utf-8", "replace") for log in logs for one in log.ranks.values() for name in one.transports}
    path = f" over {', '.join(sorted(ways))}" if ways else ""
    what = "a collective did not come back" if note else f"all ranks are initialised, and no collective followed{path}"
    yield _made(
        Finding(
            "DIAG-P2P",
            Severity.ERROR,
            facts.host,
            f"{what}: the path between the GPUs is suspect (ACS or the IOMMU redirects peer writes)",
            "lspci -vvv | grep -E 'ACSCtl.*(ReqRedir|CmpltRedir)\\+' on the node; to go on meanwhile, set "
            "NCCL_P2P_DISABLE=1 together with disable-custom-all-reduce",
        ),
        *(_lines(note) if note else ()),
        *(_lines(peer) if peer else ()),
        *(one.complete for one in ranks),
    )


def _collective_count(log: object) -> int:
    ranks = getattr(log, "ranks", {})
    return sum(one.collectives for one in ranks.values())


def silent_after_init(size: int | None, complete: int, collectives: int) -> bool:
    """Whether communicators are there on every rank and nothing was ever sent (with COLL logged, or not at all)."""
    return bool(size) and size is not None and complete >= size and collectives == 0


def _is_broken(run: Run | None) -> bool:
    return run is not None and bool(run.notes.keys() & {"watchdog", "dead", "hit", "quit", "collective"})


def _target_twice(facts: Facts) -> Iterator[Suspect]:
    run = facts.run
    loads = run.loads if run else []
    again = [load for load in loads[1:] if load.model == loads[0].model]
    if again:
        yield _made(
            Finding(
                "DIAG-TARGET-TWICE",
                Severity.ERROR,
                facts.host,
                f"{again[0].model} was loaded twice: the drafter's path is missing, so the target drafts for itself",
                "set sglang_server_drafter_path (speculative-draft-model-path), then deploy",
            ),
            loads[0].evidence,
            again[0].evidence,
        )


def _acceptance(facts: Facts) -> Iterator[Suspect]:
    run = facts.run
    if run is None:
        return
    decode, simulated = run.decode, facts.environment.get("SGLANG_SIMULATE_ACC_LEN")
    asked = facts.arguments.get("speculative-algorithm", "none").lower() not in ("none", "null", "")
    if asked and decode.lines >= ENOUGH_LINES and not decode.with_length:
        yield _made(
            Finding(
                "DIAG-NO-SPECULATION",
                Severity.ERROR,
                facts.host,
                "a drafter is configured, and no decode line reports an accept length",
                "pivot check, then compare config/ with process/cmdline.json in the bundle",
            ),
            facts.log.evidence(decode.last),
        )
    length = decode.accept_length
    if length is None or decode.lowest is None or decode.highest is None:
        return
    recent = [facts.log.evidence(place) for _, place in decode.recent]
    most = _most(facts)
    if length <= NEAR_ONE:
        quant = next((load.evidence for load in run.loads[1:] if load.quant), None)
        yield _made(
            Finding(
                "DIAG-ACCEPT-NONE",
                Severity.ERROR,
                facts.host,
                f"the draft gives nothing: accept length {length:.2f} over {decode.with_length} lines. Check, in this "
                "order, d2t, the captured layers, the attention backend, quantisation, drafter and target as a pair",
                "ansible-playbook deploy.yml --tags debug-on shows what reaches the drafter; see pivot check",
            ),
            *recent[-2:],
            quant,
        )
    elif simulated or (
        decode.with_length >= ENOUGH_LINES
        and decode.lowest[0] == decode.highest[0]
        and length >= (most - 0.005 if most is not None else 2)
        and length == round(length)
    ):
        why = f"SGLANG_SIMULATE_ACC_LEN is {simulated}" if simulated else "a loop in the text, or simulated acceptance"
        yield _made(
            Finding(
                "DIAG-ACCEPT-MAX",
                Severity.ERROR,
                facts.host,
                f"the accept length is {length:.2f} on every line: {why}",
                "ask real prompts over the chat template and read the answers; unset SGLANG_SIMULATE_ACC_LEN",
            ),
            *recent[-2:],
        )
    else:
        yield from _decline(facts, run)


def _most(facts: Facts) -> float | None:
    """The longest accept length that the settings allow, None when they are not known."""
    for name, more in (("speculative-num-draft-tokens", 0), ("speculative-num-steps", 1)):
        value = facts.arguments.get(name, "")
        if value.isdigit() and len(value) < 6:
            return float(int(value) + more)
    return None


def _decline(facts: Facts, run: Run) -> Iterator[Suspect]:
    """Acceptance that falls as contexts grow."""
    enough = sorted(
        (b, total / count, place) for b, (count, total, place) in run.decode.by_context.items() if count >= 5
    )
    if len(enough) < 2:
        return
    (first, short, short_place), (last, long, long_place) = enough[0], enough[-1]
    if last - first < 2 or short < NEAR_ONE + 0.35 or long > DECLINE * short:
        return
    yield _made(
        Finding(
            "DIAG-ACCEPT-CONTEXT",
            Severity.WARNING,
            facts.host,
            f"the accept length falls with the context: {short:.2f} to {1 << first} tokens, {long:.2f} at {1 << last}",
            "compare the drafter's rope_theta, rope_scaling and max_position_embeddings with its training",
        ),
        facts.log.evidence(short_place),
        facts.log.evidence(long_place),
    )


def _weights(facts: Facts) -> Iterator[Suspect]:
    if note := facts.note("unexpected-weight"):
        yield _made(
            Finding(
                "DIAG-WEIGHT-NAMES",
                Severity.WARNING,
                facts.host,
                "the engine skips weights of a checkpoint, or misses some",
                "pivot manifest DIRECTORY lists the tensors; pivot check compares them with what the engine reads",
            ),
            *_lines(note),
        )


def _failed(facts: Facts) -> list[Run]:
    """Runs that ended badly, the latest first: the current one, then those before it."""
    runs = [*facts.earlier, *([facts.run] if facts.run else [])]
    return [run for run in reversed(runs) if _is_broken(run) or (run.ended and not run.clean)][:4]


def _ends(facts: Facts) -> Iterator[Suspect]:
    run = facts.run
    failed = _failed(facts)
    latest = failed[0] if failed and (failed[0] is run or run is None or run.ready is None) else None
    if run and (note := run.note("watchdog")):
        yield _made(
            Finding(
                "DIAG-WATCHDOG",
                Severity.ERROR,
                facts.host,
                f"the {(note.groups or ('server',))[0].lower()} made no step for the whole watchdog time",
                "py-spy dump --pid PID of every scheduler, twice: the rank that differs is the one to look at",
            ),
            *_lines(note),
        )
    if latest and (note := latest.note("port")):
        yield _made(
            Finding(
                "DIAG-PORT",
                Severity.ERROR,
                facts.host,
                "a port that the server needs is taken",
                "ss -ltnp shows by whom (system/sockets.txt in the bundle)",
            ),
            *_lines(note),
        )
    if latest and (note := latest.note("start-timeout")):
        yield _made(
            Finding(
                "DIAG-START-TIMEOUT",
                Severity.ERROR,
                facts.host,
                "systemd gave up waiting for the start",
                "raise sglang_server_start_seconds above what the phases need",
            ),
            *_lines(note),
        )
    if latest and (found := latest.cause):
        yield _made(
            Finding(
                "DIAG-EXCEPTION",
                Severity.ERROR,
                facts.host,
                f"the server ended with {found[0][:200]}",
                "pivot check: a layer id that does not exist, or the wrong number of them"
                if "aux hidden states" in found[0]
                else "read the traceback above this line",
            ),
            found[1],
        )
    if latest and (death := _death(latest)):
        yield _made(
            Finding(
                "DIAG-KILLED",
                Severity.ERROR,
                facts.host,
                f"{death[0]} was killed by signal {death[1]}; the OOM killer does that, and people do",
                "dmesg -T | grep -i -E 'oom|killed process' on the node; last, and the shell's history, name people",
            ),
            *death[2],
        )


def _death(run: Run) -> tuple[str, str, tuple[Evidence, ...]] | None:
    """Which process a signal ended, by which signal, and where that stands."""
    dead, exited = run.note("dead"), run.note("exited")
    if dead and (code := next((group for group in dead.groups if re.fullmatch(r"-\d+", group)), "")):
        who = next((group for group in dead.groups if group != code), "a scheduler")
        return (f"rank {who}" if who.isdigit() and len(who) < 4 else who), code[1:], _lines(dead)
    # the main process kills itself when a child is gone: that is no cause
    if exited and exited.groups[0] in ("killed", "dumped") and not run.notes.keys() & {"dead", "quit", "hit"}:
        return "the main process", exited.groups[1].partition("/")[0], _lines(exited)
    return None


def _health(facts: Facts) -> Iterator[Suspect]:
    run = facts.run
    answer = facts.answers.get("/health")
    if run is None:
        return
    lies = run.health_good is not None and _is_broken(run) and run.health_good.last.line >= _first_break(run)
    other = [one for one in facts.answers.values() if one.path == "/server_info" and one.status is None]
    if lies or (answer and answer.status == 200 and other):
        yield _made(
            Finding(
                "DIAG-HEALTH-LIES",
                Severity.WARNING,
                facts.host,
                "/health answered 200 while the server was broken: the evidence counts, not the answer",
                "ask for tokens instead: ansible-playbook deploy.yml --tags verify",
            ),
            run.health_good.last if run.health_good else None,
        )
    late = run.note("health-failed")
    if late and run.decode.last is not None and run.decode.last[0] > late.last.line and not _is_broken(run):
        yield _made(
            Finding(
                "DIAG-HEALTH-SLOW",
                Severity.WARNING,
                facts.host,
                "/health failed although the server went on generating: a long prefill outlasted its time limit",
                "raise SGLANG_HEALTH_CHECK_TIMEOUT to 60, and probe no more often than every 30 s",
            ),
            *_lines(late),
            facts.log.evidence(run.decode.last),
        )


def _first_break(run: Run) -> int:
    kinds = ("watchdog", "dead", "hit", "quit", "collective")
    return min(note.first.line for kind in kinds if (note := run.note(kind)))


def _gaps(facts: Facts) -> Iterator[Suspect]:
    notes = [note for gaps in (facts.log.gaps, facts.before.gaps, facts.kernel.notes) for kind, note in gaps.items()
             if kind in ("suppressed", "missed")]  # fmt: skip
    if notes:
        yield _made(
            Finding(
                "DIAG-LOG-GAP",
                Severity.WARNING,
                facts.host,
                "the journal dropped messages: what is missing here may have been said",
                "set LogRateLimitIntervalSec=0 in the unit (Pivot's own unit has it), then reproduce",
            ),
            *(line for note in notes for line in _lines(note)),
        )


CHECKS: tuple[Callable[[Facts], Iterator[Suspect]], ...] = (
    _volume,
    _shared_memory,
    _gpus,
    _leftovers,
    _memory,
    _processes,
    _caches,
    _target_twice,
    _collectives,
    _ends,
    _acceptance,
    _weights,
    _health,
    _gaps,
)
