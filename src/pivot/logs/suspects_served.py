"""Suspects about what a server serves: which models it loaded, what is accepted, what its health says."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pivot.findings import Severity
from pivot.logs.evidence import Facts
from pivot.logs.server_log import BREAKS, Run
from pivot.logs.suspect import Suspect, suspect

NEAR_ONE = 1.15  # an accept length up to this is a drafter that gives nothing
AT_MOST = 0.05  # accept lengths this close to the longest that is possible count as it
DECLINE = 0.75  # share of the accept length that is left in long contexts, below which it is worth a word
ENOUGH_LINES = 3
UNQUANTISED = ("", "None", "none", "unquant")


def target_twice(facts: Facts) -> Iterator[Suspect]:
    """The target's class loaded in the drafter's place."""
    run, note = facts.run, facts.note("no-drafter")
    loads = run.loads if run else []
    again = [load for load in loads[1:] if load.model == loads[0].model]
    if again or note:
        yield suspect(
            "DIAG-TARGET-TWICE",
            Severity.ERROR,
            facts,
            f"{again[0].model if again else 'the target'} was loaded twice: the drafter's path is missing, so the "
            "target drafts for itself",
            "set sglang_server_drafter_path (speculative-draft-model-path), then deploy",
            evidence=[*(load.evidence for load in loads[:1] if again), *(load.evidence for load in again[:1]), note],
        )


def no_speculation(facts: Facts) -> Iterator[Suspect]:
    """A drafter that is configured, and of which the decode lines know nothing."""
    run = facts.run
    asked = facts.arguments.get("speculative-algorithm", "none").lower() not in ("none", "null", "")
    if run and asked and run.decode.lines >= ENOUGH_LINES and not run.decode.with_length:
        yield suspect(
            "DIAG-NO-SPECULATION",
            Severity.ERROR,
            facts,
            "a drafter is configured, and no decode line reports an accept length",
            "pivot check, then compare config/ with process/cmdline.json in the bundle",
            evidence=[facts.log.evidence(run.decode.last)],
        )


def acceptance(facts: Facts) -> Iterator[Suspect]:
    """Acceptance that is next to none, the most that is possible all the time, or falls with the context."""
    run = facts.run
    length = run.decode.accept_length if run else None
    if run is None or length is None:
        return
    recent = [facts.log.evidence(place) for _, place in run.decode.recent][-2:]
    if length <= NEAR_ONE:
        quant = next((load.evidence for load in run.loads[1:] if load.quant not in UNQUANTISED), None)
        yield suspect(
            "DIAG-ACCEPT-NONE",
            Severity.ERROR,
            facts,
            f"the draft gives nothing: accept length {length:.2f} over {run.decode.with_length} lines. Check, in this "
            "order, d2t, the captured layers, the attention backend, quantisation, drafter and target as a pair",
            "ansible-playbook deploy.yml --tags debug-on shows what reaches the drafter; see pivot check",
            evidence=[*recent, quant],
        )
    elif why := _too_good(facts, run, length):
        yield suspect(
            "DIAG-ACCEPT-MAX",
            Severity.ERROR,
            facts,
            f"the accept length is {length:.2f} on every line: {why}",
            "ask real prompts over the chat template and read the answers; unset SGLANG_SIMULATE_ACC_LEN",
            evidence=recent,
        )
    else:
        yield from _decline(facts, run)


def _too_good(facts: Facts, run: Run, length: float) -> str:
    """Why the acceptance cannot be believed; "" when it can."""
    simulated = facts.environment.get("SGLANG_SIMULATE_ACC_LEN")
    if simulated:
        return f"SGLANG_SIMULATE_ACC_LEN is {simulated}"
    decode, most = run.decode, _most(facts)
    if decode.with_length < ENOUGH_LINES or decode.lowest is None or decode.highest is None:
        return ""
    same = decode.lowest[0] == decode.highest[0] == round(length) >= 2
    if (same and most is None) or (most is not None and decode.lowest[0] >= most - AT_MOST):
        return "a loop in the text, or simulated acceptance"
    return ""


def _most(facts: Facts) -> float | None:
    """The longest accept length that the settings allow, None when they are not known."""
    found = []
    for name, more in (("speculative-num-draft-tokens", 0), ("speculative-num-steps", 1)):
        value = facts.arguments.get(name, "")
        if value.isdecimal() and 0 < int(value[:6]) < 1000:
            found.append(float(int(value) + more))
    return min(found, default=None)


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
    yield suspect(
        "DIAG-ACCEPT-CONTEXT",
        Severity.WARNING,
        facts,
        f"the accept length falls with the context: {short:.2f} to {1 << first} tokens, {long:.2f} at {1 << last}",
        "compare the drafter's rope_theta, rope_scaling and max_position_embeddings with its training",
        evidence=[facts.log.evidence(short_place), facts.log.evidence(long_place)],
    )


def weight_names(facts: Facts) -> Iterator[Suspect]:
    """Weights that the engine passes over."""
    if note := facts.note("unexpected-weight"):
        yield suspect(
            "DIAG-WEIGHT-NAMES",
            Severity.WARNING,
            facts,
            "the engine skips weights of a checkpoint, or misses some",
            "pivot manifest DIRECTORY lists the tensors; pivot check compares them with what the engine reads",
            evidence=[note],
        )


def health(facts: Facts) -> Iterator[Suspect]:
    """Health that lies, either way."""
    run, answer = facts.run, facts.answers.get("/health")
    if run is None:
        return
    lies = run.health_good is not None and run.broken and run.health_good.last.line >= _first_break(run)
    other = [one for one in facts.answers.values() if one.path == "/server_info" and one.status is None]
    if lies or (answer and answer.status == 200 and other):
        yield suspect(
            "DIAG-HEALTH-LIES",
            Severity.WARNING,
            facts,
            "/health answered 200 while the server was broken: the evidence counts, not the answer",
            "ask for tokens instead: ansible-playbook deploy.yml --tags verify",
            evidence=[run.health_good.last if run.health_good else None],
        )
    late = run.note("health-failed")
    if late and run.decode.last is not None and run.decode.last[0] > late.last.line and not run.broken:
        yield suspect(
            "DIAG-HEALTH-SLOW",
            Severity.WARNING,
            facts,
            "/health failed although the server went on generating: a long prefill outlasted its time limit",
            "raise SGLANG_HEALTH_CHECK_TIMEOUT to 60, and probe no more often than every 30 s",
            evidence=[late, facts.log.evidence(run.decode.last)],
        )


def _first_break(run: Run) -> int:
    return min(note.first.line for kind in BREAKS if (note := run.note(kind)))


def gaps(facts: Facts) -> Iterator[Suspect]:
    """What a rate-limited journal has dropped."""
    kinds = (facts.log.gaps, facts.before.gaps, facts.kernel.notes)
    notes = [note for found in kinds for kind in ("suppressed", "missed") if (note := found.get(kind))]
    if notes:
        yield suspect(
            "DIAG-LOG-GAP",
            Severity.WARNING,
            facts,
            "the journal dropped messages: what is missing here may have been said",
            "set LogRateLimitIntervalSec=0 in the unit (Pivot's own unit has it), then reproduce",
            evidence=notes,
        )


def silent_nccl(facts: Facts) -> Iterator[Suspect]:
    """A log file that NCCL was asked for and does not write, or writes elsewhere."""
    file, level = facts.environment.get("NCCL_DEBUG_FILE", ""), facts.environment.get("NCCL_DEBUG", "")
    expanded = facts.unit_line("NCCL_DEBUG_FILE", r"(?<!%)%[hp]")
    if not file or (level.upper() in ("WARN", "INFO", "TRACE") and not expanded):
        return
    why = "systemd has replaced %h or %p in it" if expanded else f"NCCL_DEBUG is {level or 'not set'}"
    yield suspect(
        "DIAG-NCCL-SILENT",
        Severity.WARNING,
        facts,
        f"NCCL_DEBUG_FILE is {file}, and the ranks' logs are not there: {why}",
        "set NCCL_DEBUG=WARN or more, and write %%h.%%p in a unit (an EnvironmentFile needs no doubling)",
        evidence=[expanded],
    )


CHECKS: tuple[Callable[[Facts], Iterator[Suspect]], ...] = (
    no_speculation,
    acceptance,
    weight_names,
    health,
    silent_nccl,
    gaps,
)
